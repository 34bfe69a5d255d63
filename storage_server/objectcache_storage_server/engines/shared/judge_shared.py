"""One commit of the shared engine: judged against the log's end, and named by a record.

It is judged first against what this server has replayed: that refuses, after a look at the log's
end, what would be refused, and reads what has to be read to compare bytes. It is judged again as a
part of the change where the index has changed since. That may happen more than once, and reads
nothing: where it would have to, the first begins again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from objectcache_schemas.errors import Busy, InvalidRequest, ObjectCacheError, StorageFull
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import Committed
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.commit_rules import check_configured_quota, check_quota
from objectcache_storage_server.engines.judge_commit import CommitJudge, NewObject
from objectcache_storage_server.engines.key_order import key_hash
from objectcache_storage_server.engines.shared.extents.staged_objects import SharedStaged
from objectcache_storage_server.engines.shared.index.version_rows import new_rows
from objectcache_storage_server.engines.shared.shared_catalog import (
    Moment,
    SharedCatalog,
    SharedChange,
    SharedView,
)
from objectcache_storage_server.engines.shared.versions import (
    ExtentName,
    ExtentShape,
    NewRow,
    SharedVersion,
)

NewShared = NewObject[SharedStaged]

QUOTA_ATTEMPTS_MAX = 6  # each after others took the room that was made
QUOTA_EXCEEDED = "QuotaExceeded"
ATTEMPTS_MAX = 8  # each after somebody else stored other versions of the same keys


class _NotCompared(Exception):
    """Bytes have to be read to judge."""


class _Verdict(NamedTuple):
    """What is to be stored, as of one moment of the index."""

    moment: Moment
    bucket: BucketRow
    to_store: Sequence[NewShared]
    rows: Sequence[NewRow]  # of them
    growth_bytes: int  # of the bucket
    new_count: int  # of objects, in place of none


class SharedCommit:
    """The steps of a commit, and what it found on the way."""

    def __init__(
        self,
        catalog: SharedCatalog,
        hash_stored: Callable[[SharedVersion, int], array[int]],
        make_room_in: Callable[[BucketRow, int, float, int], bool],
        new: Sequence[NewShared],
        condition: Condition,
    ) -> None:
        """For `hash_stored` see `CommitJudge`. `make_room_in` evicts from a bucket what its quota
        wants gone before it grows, until a deadline, and some bytes more; whether there was room.
        """
        self.judge = CommitJudge[SharedStaged, SharedVersion](new, condition, self._hash_stored)
        self._catalog = catalog
        self._read_and_hash = hash_stored
        self._make_room_in = make_room_in
        self._may_read = True
        self._bucket_name = new[0].staged.bucket
        self._keys = [each.info.key for each in new]
        self._verdict: _Verdict | None = None
        self.outcome: list[Committed] = []  # of the last verdict
        self.kept_extents: set[ExtentName] = set()  # of what was stored before, and was put again

    def carry_out(self, deadline_s: float) -> None:
        """Store durably what `judge_first` found to be stored; all its bytes are in the store by
        now, so that its bucket makes room for nothing in vain. Raises as `Engine.commit` says.
        """
        refusals = 0
        for _ in range(ATTEMPTS_MAX):
            verdict = self._verdict
            assert verdict is not None, "carried out before it was judged"
            growth_bytes = verdict.growth_bytes
            spare_bytes = growth_bytes * ((1 << refusals) - 1)  # more each time, so that some stays
            had_room = self._make_room_in(verdict.bucket, growth_bytes, deadline_s, spare_bytes)
            try:
                stored = self._catalog.change(self._store, deadline_s)
            except _NotCompared:
                pass
            except StorageFull as full:
                if full.code != QUOTA_EXCEEDED or not had_room:
                    raise
                refusals += 1
                if refusals == QUOTA_ATTEMPTS_MAX:
                    raise Busy(
                        f"others fill bucket {self._bucket_name!r} as fast as room is made in it; "
                        "try again"
                    ) from full
            else:
                for each in stored:
                    each.staged.keep()
                return
            if not self.judge_first(deadline_s):
                return  # all is stored by now
        raise Busy(f"keys of bucket {self._bucket_name!r} change all the time; try again")

    def judge_first(self, deadline_s: float) -> bool:
        """Whether there is anything to store, whose rows are then made. What is replayed may be
        old, so nothing is refused or found to be stored but by the log's end.
        """
        try:
            if self._judge_replayed():
                return True
        except ObjectCacheError:
            pass
        self._catalog.follow(deadline_s)
        return self._judge_replayed()

    def _judge_replayed(self) -> bool:
        with self._catalog.reading() as view:
            moment, bucket, stored = self._look_up(view)
        self._may_read = True
        return bool(self._judge(moment, bucket, stored).to_store)

    def _look_up(self, view: SharedView) -> tuple[Moment, BucketRow, Mapping[str, SharedVersion]]:
        bucket = view.bucket(self._bucket_name)
        return view.moment, bucket, view.versions(bucket.number, self._keys)

    def _judge(
        self, moment: Moment, bucket: BucketRow, stored: Mapping[str, SharedVersion]
    ) -> _Verdict:
        to_store = self.judge.to_store(bucket.info, stored)
        self.outcome = self.judge.outcome(to_store, stored)
        new_keys = {each.info.key for each in to_store}
        kept = (version for key, version in stored.items() if key not in new_keys)
        self.kept_extents = {name for version in kept for name in version.extents}
        growth_bytes = self.judge.growth_bytes(to_store, stored)
        before = self._verdict
        if before is not None and (before.bucket, before.to_store) == (bucket, to_store):
            rows = before.rows
        else:
            rows = new_rows(_version(each, bucket) for each in to_store)
        new_count = sum(each.info.key not in stored for each in to_store)
        self._verdict = _Verdict(moment, bucket, to_store, rows, growth_bytes, new_count)
        return self._verdict

    def _store(self, change: SharedChange) -> Sequence[NewShared]:
        """The verdict that counts, and the change."""
        verdict = self._verdict
        if verdict is None or change.moment.changes or verdict.moment != change.moment:
            self._may_read = False
            verdict = self._judge(*self._look_up(change))
        bucket, to_store = verdict.bucket, verdict.to_store
        totals = change.totals(bucket.number)
        check_quota(bucket.info, totals.stored_bytes, verdict.growth_bytes)
        check_configured_quota(bucket.info, totals, verdict.growth_bytes, verdict.new_count)
        _take_over(change, to_store)
        shapes: dict[ExtentName, ExtentShape] = {}
        for each in to_store:
            shapes.update(each.staged.shapes())
        change.add(verdict.rows, shapes)
        return to_store

    def _hash_stored(self, stored: SharedVersion, block_bytes: int) -> array[int]:
        if not self._may_read:
            raise _NotCompared
        return self._read_and_hash(stored, block_bytes)


def _take_over(change: SharedChange, to_store: Sequence[NewShared]) -> None:
    """Delete the versions whose extents the new ones are; raises `InvalidRequest`."""
    wanted = [version.name for each in to_store for version in each.staged.sources]
    if wanted and len(change.delete(wanted)) < len(wanted):
        raise InvalidRequest("a part changed during completion", code="InvalidPart")


def _version(new: NewShared, bucket: BucketRow) -> SharedVersion:
    """The version as the index stores it."""
    staged = new.staged
    extents, slot = staged.place()
    parent_key = staged.parent_key
    return SharedVersion(
        bucket.number,
        new.info,
        0,
        staged.block_bytes,
        staged.checksums(),
        extents,
        slot,
        staged.is_chunk or bucket.info.layout is not None,
        0 if parent_key is None else key_hash(bucket.number, parent_key),
    )
