"""One commit of the local engine: judged, its bytes flushed, and named in the index.

It is judged twice. The first time without a lock, so that what is refused or stored already costs
no flush; the second time inside the transaction, whose verdict counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from objectcache_schemas.errors import DamagedData, InvalidRequest, StorageFull
from objectcache_schemas.records import BucketInfo, Condition, Durability, ObjectInfo
from objectcache_storage_server.engines.base import Committed, StagedPut
from objectcache_storage_server.engines.block_checksums import BlockHasher
from objectcache_storage_server.engines.commit_rules import Verdict, check_fits_layout, judge
from objectcache_storage_server.engines.content_etags import content_etag
from objectcache_storage_server.engines.local.index.lmdb_index import IndexChange
from objectcache_storage_server.engines.local.puts.staged_runs import LocalStaged
from objectcache_storage_server.engines.local.reads.verified_reads import PIECE_BYTES
from objectcache_storage_server.engines.local.records import BucketRow, Version, key_hash

if TYPE_CHECKING:
    from objectcache_storage_server.engines.local.engine import LocalEngine


@dataclass(frozen=True, slots=True)
class NewObject:
    """A staged object and what will be said of it."""

    staged: LocalStaged
    info: ObjectInfo

    @staticmethod
    def of(put: StagedPut, modified_s: float) -> NewObject:
        """The object that a put would store; asserts that it was written whole."""
        staged = put.staged
        assert isinstance(staged, LocalStaged)
        staged.finish()
        size_bytes = staged.size_bytes()
        info = ObjectInfo(
            key=staged.key,
            size_bytes=size_bytes,
            etag=put.etag or content_etag(size_bytes, staged.checksums()),
            modified_s=modified_s,
            attributes=put.attributes,
        )
        return NewObject(staged, info)

    @property
    def key(self) -> str:
        """The object's key."""
        return self.info.key

    def version(self, bucket: BucketRow, number: int) -> Version:
        """The version as the index stores it."""
        staged = self.staged
        extents, slot = staged.place()
        parent_key = staged.parent_key
        return Version(
            bucket_number=bucket.number,
            info=self.info,
            number=number,
            serial=0,
            block_bytes=staged.block_bytes,
            checksums=staged.checksums(),
            extents=extents,
            slot=slot,
            is_evictable=staged.is_chunk or bucket.info.layout is not None,
            parent_hash=0 if parent_key is None else key_hash(bucket.number, parent_key),
        )


class LocalCommit:
    """The steps of a commit, and what it found on the way. `commit_group` takes them in order."""

    def __init__(self, engine: LocalEngine, new: Sequence[NewObject], condition: Condition) -> None:
        self.damaged: dict[str, str] = {}  # key to reason, of stored versions that were replaced
        self.bucket_name = new[0].staged.bucket
        self.keys = [each.key for each in new]
        self.to_store: Sequence[NewObject] = ()
        self.replaced: list[Version] = []
        self.taken_over: list[Version] = []
        self.versions: Sequence[Version] = ()  # what was stored
        self.durable = True
        self._engine = engine
        self._holdings = engine.holdings
        self._new = new
        self._condition = condition
        self._stored: Mapping[str, Version] = {}
        self._flushed: set[int] = set()
        self._same_bytes: dict[tuple[str, int], bool] = {}  # by key and serial, where it was read

    @property
    def takes_over(self) -> bool:
        """Whether it deletes stored versions to have their extents."""
        return any(each.staged.sources for each in self._new)

    def prepare(self) -> None:
        """Refuse what is refused already, and make room; raises as `Engine.commit` says."""
        with self._engine.index.reading() as view:
            bucket = view.bucket(self.bucket_name)
            self._stored = view.versions(bucket.number, self.keys)
        self.to_store = self._judge(bucket, self._stored)
        self.durable = bucket.info.policy.durability is Durability.SYNC
        self._engine.make_room_in(bucket, self._growth_bytes(self.to_store, self._stored))

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
        self.to_store = self._judge(bucket, stored)
        growth_bytes = self._growth_bytes(self.to_store, stored)
        self._check_quota(bucket, grown_bytes[bucket.number], growth_bytes)
        self.durable = bucket.info.policy.durability is Durability.SYNC
        missing = self.written_extents() - self._flushed
        if missing:  # the verdict is another one by now
            self._engine.flush_extents(sorted(missing))
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
            each.version(bucket, number)
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
        is_new = {each.key for each in self.to_store}
        return [
            Committed(each.info, existed=False)
            if each.key in is_new
            else Committed(self._stored[each.key].info, existed=True)
            for each in self._new
        ]

    def _add_extents(
        self, change: IndexChange, bucket: BucketRow, versions: Sequence[Version]
    ) -> None:
        numbers = sorted({number for version in versions for number in version.extents})
        layout = bucket.info.layout
        with self._holdings.lock:
            rows = self._holdings.extents.rows
            if layout is not None:  # a chunk on its own: of a shape that can be moved together
                for version in versions:
                    if len(version.extents) == 1 and rows["slots"][version.extents[0]] == 1:
                        rows["num_layers"][version.extents[0]] = layout.num_layers
                        rows["slice_bytes"][version.extents[0]] = layout.per_layer_chunk_bytes
            added = rows[numbers]
        change.add_extents(numbers, added)
        if bucket.info.policy.durability is Durability.ASYNC:
            change.mark_unflushed(numbers)

    # --- judging ---

    def _judge(self, bucket: BucketRow, stored: Mapping[str, Version]) -> list[NewObject]:
        """Those that are to be stored."""
        self.damaged = {}
        return [each for each in self._new if self._is_to_store(bucket, each, stored.get(each.key))]

    def _is_to_store(self, bucket: BucketRow, new: NewObject, stored: Version | None) -> bool:
        check_fits_layout(new.key, new.info.size_bytes, bucket.info.layout)
        try:
            verdict = judge(
                new.key,
                self._condition,
                self._condition.immutable or bucket.info.layout is not None,
                stored.info if stored else None,
                lambda: stored is not None and self._holds_same_bytes(stored, new),
            )
        except DamagedData as damage:  # what is stored is no bytes of anybody's: put it right
            self.damaged[new.key] = str(damage)
            return True
        return verdict is Verdict.STORE

    def _holds_same_bytes(self, stored: Version, new: NewObject) -> bool:
        if stored.info.size_bytes != new.info.size_bytes:
            return False
        if stored.block_bytes == new.staged.block_bytes:
            return stored.checksums == new.staged.checksums()
        name = (new.key, stored.serial)
        if name not in self._same_bytes:
            self._same_bytes[name] = self._compare(stored, new.staged)
        return self._same_bytes[name]

    def _compare(self, stored: Version, new: LocalStaged) -> bool:
        """Read the stored bytes and hash them in the new blocks; raises `DamagedData`."""
        hasher = BlockHasher(new.block_bytes)
        with self._engine.open_versions([stored]) as opened:
            piece = memoryview(bytearray(min(PIECE_BYTES, stored.info.size_bytes)))
            for offset_bytes in range(0, stored.info.size_bytes, PIECE_BYTES):
                part = piece[: stored.info.size_bytes - offset_bytes]
                opened.read_into(0, offset_bytes, part)
                hasher.update(part)
        return hasher.finish() == new.checksums()

    # --- room ---

    @staticmethod
    def _growth_bytes(to_store: Sequence[NewObject], stored: Mapping[str, Version]) -> int:
        return sum(
            each.info.size_bytes - (stored[each.key].info.size_bytes if each.key in stored else 0)
            for each in to_store
        )

    def _check_quota(self, bucket: BucketRow, grown_bytes: int, growth_bytes: int) -> None:
        quota_bytes = bucket.info.policy.quota_bytes
        stored_bytes = self._holdings.stored_bytes.get(bucket.number, 0) + grown_bytes
        if quota_bytes is not None and growth_bytes > 0:
            over_bytes = stored_bytes + growth_bytes - quota_bytes
            if over_bytes > 0:
                raise quota_exceeded(bucket.info, stored_bytes, growth_bytes)


def quota_exceeded(bucket: BucketInfo, stored_bytes: int, growth_bytes: int) -> StorageFull:
    """For a put that a bucket's quota does not let in."""
    return StorageFull(
        f"bucket {bucket.name!r} holds {stored_bytes} bytes, {growth_bytes} more are over its "
        f"quota_bytes of {bucket.policy.quota_bytes}",
        code="QuotaExceeded",
        quota="stored_bytes",
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
