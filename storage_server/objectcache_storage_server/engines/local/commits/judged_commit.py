"""One commit of the local engine: judged, its bytes flushed, and named in the index."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.records import Condition, Durability
from objectcache_storage_server.engines.base import Committed
from objectcache_storage_server.engines.block_checksums import BlockHasher
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.commit_rules import check_quota
from objectcache_storage_server.engines.judge_commit import CommitJudge, NewObject
from objectcache_storage_server.engines.key_order import key_hash
from objectcache_storage_server.engines.local.index.lmdb_index import IndexChange
from objectcache_storage_server.engines.local.objects.stored_objects import StoredObjects
from objectcache_storage_server.engines.local.puts.staged_runs import LocalStaged
from objectcache_storage_server.engines.local.reads.verified_reads import PIECE_BYTES
from objectcache_storage_server.engines.local.records import Version

NewLocal = NewObject[LocalStaged]


class LocalCommit:
    """The steps of a commit, and what it found on the way. `commit_group` takes them in order."""

    def __init__(
        self,
        objects: StoredObjects,
        make_room_in: Callable[[BucketRow, int], None],
        new: Sequence[NewLocal],
        condition: Condition,
    ) -> None:
        """`make_room_in` evicts from a bucket what its quota wants gone before it grows."""
        self.judge = CommitJudge[LocalStaged, Version](new, condition, self._hash_stored)
        self.bucket_name = new[0].staged.bucket
        self.keys = [each.key for each in new]
        self.to_store: Sequence[NewLocal] = ()
        self.replaced: list[Version] = []
        self.taken_over: list[Version] = []
        self.versions: Sequence[Version] = ()  # what was stored
        self.durable = True
        self._objects = objects
        self._make_room_in = make_room_in
        self._holdings = objects.holdings
        self._new = new
        self._stored: Mapping[str, Version] = {}
        self._flushed: set[int] = set()

    @property
    def takes_over(self) -> bool:
        """Whether it deletes stored versions to have their extents."""
        return any(each.staged.sources for each in self._new)

    def prepare(self) -> None:
        """Refuse what is refused already, and make room; raises as `Engine.commit` says."""
        with self._objects.index.reading() as view:
            bucket = view.bucket(self.bucket_name)
            self._stored = view.versions(bucket.number, self.keys)
        self.to_store = self.judge.to_store(bucket.info, self._stored)
        self.durable = bucket.info.policy.durability is Durability.SYNC
        self._make_room_in(bucket, self.judge.growth_bytes(self.to_store, self._stored))

    def written_extents(self) -> set[int]:
        """Extents that have to be durable before the index names them."""
        if not self.durable:
            return set()
        # What is taken over from stored versions was flushed with them.
        written = [each for each in self.to_store if not each.staged.sources]
        return {number for each in written for number in each.staged.place()[0]}

    def flushed(self) -> None:
        """The bytes of `written_extents` are durable."""
        self._flushed |= self.written_extents()

    def judge_again(self, change: IndexChange, grown_bytes: Counter[int]) -> BucketRow:
        """The verdict that counts. `grown_bytes`, by bucket, of what is stored with it.

        Raises as `Engine.commit` says, and then has changed nothing.
        """
        bucket = change.bucket(self.bucket_name)
        self._stored = stored = change.versions(bucket.number, self.keys)
        self.to_store = self.judge.to_store(bucket.info, stored)
        growth_bytes = self.judge.growth_bytes(self.to_store, stored)
        held_bytes = self._holdings.stored_bytes.get(bucket.number, 0)
        check_quota(bucket.info, held_bytes + grown_bytes[bucket.number], growth_bytes)
        self.durable = bucket.info.policy.durability is Durability.SYNC
        missing = self.written_extents() - self._flushed
        if missing:  # the verdict is another one by now
            self._objects.flushes.flush(sorted(missing))
        grown_bytes[bucket.number] += growth_bytes
        self.replaced = [stored[each.key] for each in self.to_store if each.key in stored]
        self.taken_over = self._take_over(change)
        return bucket

    def _take_over(self, change: IndexChange) -> list[Version]:
        """Delete the versions whose extents the new ones are; raises `InvalidRequest`."""
        wanted = [version for each in self.to_store for version in each.staged.sources]
        deleted = change.delete(version.name for version in wanted)
        if len(deleted) < len(wanted):
            raise InvalidRequest("a part changed during completion", code="InvalidPart")
        return deleted

    def name_versions(
        self, change: IndexChange, bucket: BucketRow, numbers: Sequence[int]
    ) -> Sequence[Version]:
        """Give the new versions numbers, and add their extents."""
        self.versions = [
            _version(each, bucket, number)
            for each, number in zip(self.to_store, numbers, strict=True)
        ]
        self._add_extents(change, bucket, self.versions)
        return self.versions

    def keep(self) -> None:
        """The index names them now."""
        kept = self._kept()
        if kept:
            self._holdings.used(kept, are_prefix=False)
        for each in self.to_store:
            each.staged.keep()

    def _kept(self) -> list[Version]:
        """What was stored before, and was put again."""
        new_keys = {each.key for each in self.to_store}
        return [self._stored[key] for key in self.keys if key not in new_keys]

    def outcome(self) -> list[Committed]:
        """What became of each object."""
        return self.judge.outcome(self.to_store, self._stored)

    def _add_extents(
        self, change: IndexChange, bucket: BucketRow, versions: Sequence[Version]
    ) -> None:
        numbers = sorted({number for version in versions for number in version.extents})
        layout = bucket.info.layout
        with self._holdings.lock:
            rows = self._holdings.extents.rows
            if layout is not None:  # a chunk on its own: of a shape that can be moved together
                for version in versions:
                    if len(version.extents) == 1 and _is_plain_run(rows[version.extents[0]]):
                        rows["num_layers"][version.extents[0]] = layout.num_layers
                        rows["slice_bytes"][version.extents[0]] = layout.per_layer_chunk_bytes
            added, pitches = rows[numbers], self._holdings.pitches_of(numbers)
        change.add_extents(numbers, added, pitches)
        if bucket.info.policy.durability is Durability.ASYNC:
            change.mark_unflushed(numbers)

    def _hash_stored(self, stored: Version, block_bytes: int) -> array[int]:
        hasher = BlockHasher(block_bytes)
        with self._objects.open_versions([stored]) as opened:
            piece = memoryview(bytearray(min(PIECE_BYTES, stored.info.size_bytes)))
            for offset_bytes in range(0, stored.info.size_bytes, PIECE_BYTES):
                part = piece[: stored.info.size_bytes - offset_bytes]
                opened.read_into(0, offset_bytes, part)
                hasher.update(part)
        return hasher.finish()


def _is_plain_run(extent: np.void) -> bool:
    return bool(extent["slots"] == 1 and not extent["is_encoded"])


def _version(new: NewLocal, bucket: BucketRow, number: int) -> Version:
    """The version as the index stores it."""
    staged = new.staged
    extents, slot = staged.place()
    parent_key = staged.parent_key
    return Version(
        bucket_number=bucket.number,
        info=new.info,
        number=number,
        serial=0,
        block_bytes=staged.block_bytes,
        checksums=staged.checksums(),
        extents=extents,
        slot=slot,
        is_evictable=staged.is_chunk or bucket.info.layout is not None,
        parent_hash=0 if parent_key is None else key_hash(bucket.number, parent_key),
        frame_checksums=staged.frame_checksums(),
    )


def fill_rows(rows: npt.NDArray[np.void], versions: Sequence[Version]) -> None:
    """The object table's columns of versions that are about to be stored."""
    for row, version in zip(rows, versions, strict=True):
        row["is_evictable"] = version.is_evictable
        row["bucket"] = version.bucket_number
        row["extent"] = version.extents[0] if version.extents else 0
        row["slot"] = version.slot
        row["own_hash"] = key_hash(version.bucket_number, version.info.key)
        row["parent_hash"] = version.parent_hash
        row["size_bytes"] = version.info.size_bytes
        row["modified_s"] = version.info.modified_s
