"""The engine over any catalog and any blob store."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import msgspec

from objectcache_schemas.errors import Busy, DamagedData, ObjectCacheError
from objectcache_schemas.operators.engine_status import EngineStatus
from objectcache_schemas.records import Condition, ObjectAttributes, ObjectInfo
from objectcache_storage_server.engines.base import (
    ALWAYS,
    CHECKSUM_BLOCK_BYTES,
    BucketTotals,
    Committed,
    EngineCapabilities,
    OpenObjects,
    PrefixShape,
    Staged,
    StagedPrefix,
    StagedPut,
    check_unchanged,
)
from objectcache_storage_server.engines.blobs.blob_catalog import (
    BlobCatalog,
    BlobChange,
    BlobVersion,
    BlobVersionName,
)
from objectcache_storage_server.engines.blobs.blob_commit import BlobCommit, NewBlob
from objectcache_storage_server.engines.blobs.blob_store import BlobRead, BlobStore, LostBlob
from objectcache_storage_server.engines.blobs.open_versions import OpenVersion, OpenVersionCache
from objectcache_storage_server.engines.blobs.read_blobs import PIECE_BYTES, BlobReader, OpenBlobs
from objectcache_storage_server.engines.blobs.staged_blobs import StagedAtOnce, StagedBlob
from objectcache_storage_server.engines.block_checksums import BlockHasher
from objectcache_storage_server.engines.bucket_rules import no_such_key
from objectcache_storage_server.engines.catalog_engine import CatalogEngine, DamageCount
from objectcache_storage_server.engines.commit_rules import check_batch
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.key_order import key_bytes

DELETE_KEYS = 256  # of one transaction, which bounds what a delete on a full device needs
WRITERS_MAX = 32  # threads that wait for writes of a store that is far away

T = TypeVar("T")

log = logging.getLogger("objectcache.storage_server.engines.blobs")


class _LostVersion(Exception):
    """The catalog named a blob that the store does not have."""

    def __init__(self, version: BlobVersion, reason: str) -> None:
        super().__init__(reason)
        self.version = version


class BlobEngine(CatalogEngine[BlobVersion], BlobReader):
    """Objects as blobs, `open_objects_max` of them kept open for the next read.

    Owns catalog and store, and closes them. Makes them agree when it opens: versions without their
    blob are dropped, and blobs that no version names are removed, but from a shared store, where
    they may be what another server is about to commit.
    """

    def __init__(
        self,
        name: str,
        catalog: BlobCatalog,
        store: BlobStore,
        open_objects_max: int,
        flush_latch: FlushLatch,
        damage: DamageCount,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(flush_latch, damage)
        self.capabilities = EngineCapabilities(name, queue_depth=store.capabilities.queue_depth)
        self.store = store
        self._catalog = catalog
        self._clock = clock
        self._staged: set[StagedBlob] = set()
        depth = min(store.capabilities.queue_depth, WRITERS_MAX)
        self._writers = ThreadPoolExecutor(depth, "blob-write") if depth else None
        self._cache = OpenVersionCache(open_objects_max, store.release)
        self._recover()

    @property
    def catalog(self) -> BlobCatalog:
        return self._catalog

    def usage(self, name: str) -> BucketTotals:
        with self._catalog.reading() as view:
            return view.totals(view.bucket(name).number)

    # --- writing ---

    def stage(
        self, bucket: str, key: str, checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES
    ) -> Staged:
        key_bytes(key)
        self.bucket_row(bucket)
        number = self._with_idle_closed(lambda: self.store.create(self.deadline_s()))
        staged = StagedBlob(
            self.store,
            number,
            bucket,
            key,
            checksum_block_bytes,
            self.deadline_s,
            self._remove,
            self._staged.discard,
        )
        self._staged.add(staged)
        return staged

    def stage_prefix(self, bucket: str, shape: PrefixShape) -> StagedPrefix:
        if self._writers is None:
            return super().stage_prefix(bucket, shape)
        return StagedAtOnce(self, bucket, shape, self._writers)

    def commit(self, puts: Sequence[StagedPut], condition: Condition = ALWAYS) -> list[Committed]:
        check_batch(puts)
        try:
            return self._commit(puts, condition) if puts else []
        finally:
            for put in puts:
                put.staged.discard()  # of no effect on what was stored

    def _commit(self, puts: Sequence[StagedPut], condition: Condition) -> list[Committed]:
        modified_s = self._clock()
        new = [_new_blob(put, modified_s) for put in puts]
        commit = BlobCommit(
            self._catalog, self._cache, self._flush, self._hash_stored, new, condition
        )
        committed = commit.carry_out()
        for key, reason in commit.judge.damaged.items():
            self.damage.add(key, reason)
        self._remove(commit.replaced_blobs)
        return committed

    def replace_attributes(
        self, bucket: str, seen: ObjectInfo, attributes: ObjectAttributes
    ) -> ObjectInfo:
        number = self.bucket_row(bucket).number
        with self._cache.changing(number, [seen.key]), self._catalog.writing() as change:
            version = change.versions(number, [seen.key]).get(seen.key)
            if version is None:
                raise no_such_key(seen.key)
            check_unchanged(version.info, seen)
            info = msgspec.structs.replace(version.info, attributes=attributes)
            change.add([replace(version, info=info)])
            return info

    def delete(self, bucket: str, keys: Sequence[str]) -> int:
        return len(self._delete(bucket, keys, lambda version: True))

    def expire(self, bucket: str, infos: Sequence[ObjectInfo]) -> BucketTotals:
        seen = {info.key: info for info in infos}
        gone = self._delete(bucket, list(seen), lambda found: found.info == seen[found.info.key])
        return BucketTotals(len(gone), sum(version.info.size_bytes for version in gone))

    def _delete(
        self, bucket: str, keys: Sequence[str], is_wanted: Callable[[BlobVersion], bool]
    ) -> list[BlobVersion]:
        number = self.bucket_row(bucket).number
        gone: list[BlobVersion] = []
        for begin in range(0, len(keys), DELETE_KEYS):
            some = keys[begin : begin + DELETE_KEYS]

            def delete(change: BlobChange, some: Sequence[str] = some) -> list[BlobVersion]:
                found = list(filter(is_wanted, change.versions(number, some).values()))
                change.delete(version.name for version in found)
                return found

            with self._cache.changing(number, some):
                deleted = self._catalog.change_with_reserve(delete)
            self._remove([version.blob_number for version in deleted])
            self._catalog.refill_reserve()
            gone += deleted
        return gone

    def _flush(self, numbers: Sequence[int]) -> None:
        self.store.flush(numbers, self.deadline_s())

    def _remove(self, numbers: Sequence[int]) -> None:
        """Delete blobs that nobody names. Where that fails they stay: nothing is said about it to
        whoever stored, deleted or read something, which has succeeded.
        """
        if numbers:
            try:
                self.store.delete(numbers, self.deadline_s())
            except ObjectCacheError as error:
                log.warning("%d blobs stay until the next start: %s", len(numbers), error)

    def _hash_stored(self, version: BlobVersion, block_bytes: int) -> array[int]:
        """Checksums of a stored version's blocks of another size, from bytes that match their own.
        Raises `DamagedData`, which drops nothing.
        """
        own, other = BlockHasher(version.block_bytes), BlockHasher(block_bytes)
        size_bytes = version.info.size_bytes
        piece = memoryview(bytearray(min(PIECE_BYTES, size_bytes)))
        try:
            blob = self.store.open(version.blob_number)
            try:
                for offset_bytes in range(0, size_bytes, PIECE_BYTES):
                    part = piece[: size_bytes - offset_bytes]
                    read = BlobRead(blob, offset_bytes, part)
                    self.store.begin_reads([read], self.deadline_s()).result()
                    own.update(part)
                    other.update(part)
            finally:
                self.store.release([blob])
        except LostBlob as lost:
            raise DamagedData(str(lost), key=version.info.key) from lost
        if own.finish() != version.checksums:
            raise DamagedData("a block does not match its checksum", key=version.info.key)
        return other.finish()

    # --- reading ---

    def open_many(
        self, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
    ) -> OpenObjects:
        number = self.bucket_row(bucket).number
        while True:
            try:
                versions = self._hold(number, keys)
            except _LostVersion as lost:  # deleted since it was looked up, or damaged; look again
                self._drop(lost.version, str(lost))
            else:
                return OpenBlobs(self, list(map(versions.get, keys)))

    def _hold(self, bucket_number: int, keys: Sequence[str]) -> dict[str, OpenVersion]:
        """What is stored of `keys`, all as of one moment, open; raises `_LostVersion`."""
        epoch, held = self._cache.hold(bucket_number, keys)
        missing = [key for key in keys if key not in held] if len(held) < len(keys) else []
        if not missing:
            return held
        try:
            versions = self._look_up(bucket_number, missing)
            if held and not self._cache.is_current(epoch):  # these are of different moments
                self.let_go(list(held.values()))
                held = {}
                versions = self._look_up(bucket_number, keys)
            opened: list[OpenVersion] = []
            for key, version in versions.items():
                held[key] = self._open(version)
                opened.append(held[key])
        except BaseException:
            self.let_go(list(held.values()))
            raise
        self._cache.add(opened, epoch)
        return held

    def _look_up(self, bucket_number: int, keys: Iterable[str]) -> dict[str, BlobVersion]:
        with self._catalog.reading() as view:
            return view.versions(bucket_number, keys)

    def _open(self, version: BlobVersion) -> OpenVersion:
        number = version.blob_number
        try:
            return OpenVersion(version, self._with_idle_closed(lambda: self.store.open(number)))
        except LostBlob as lost:
            raise _LostVersion(version, str(lost)) from lost

    def let_go(self, versions: Sequence[OpenVersion]) -> None:
        self._cache.let_go(versions)

    # --- damage ---

    def drop_lost(self, version: OpenVersion, reason: str) -> Exception:
        key = version.version.info.key
        if not self.flush_latch.failure:
            self._drop(version.version, reason)
        return DamagedData(f"{key!r} is damaged: {reason}", key=key)

    def _drop(self, version: BlobVersion, reason: str) -> None:
        key = version.info.key
        with self._cache.changing(version.bucket_number, [key]):
            dropped = self._delete_versions([version.name])
        if dropped:  # else it was replaced, deleted or dropped meanwhile
            self.damage.add(key, reason)
            self._remove([version.blob_number])

    def _delete_versions(self, names: Sequence[BlobVersionName]) -> int:
        return self._catalog.change_with_reserve(lambda change: change.delete(names))

    # --- the engine itself ---

    def status(self) -> EngineStatus:
        # Objects are not counted: a catalog may have to walk all of them for that.
        return EngineStatus(
            engine=self.capabilities.name,
            damaged=self.damaged_count,
            flush_failure=self.flush_failure,
        )

    def close(self) -> None:
        for staged in list(self._staged):
            staged.discard()
        self._cache.clear()
        if self._writers is not None:
            self._writers.shutdown()
        self._catalog.close()
        self.store.close()

    def _recover(self) -> None:
        found = self.store.sizes()
        kept: set[int] = set()
        damaged: list[BlobVersionName] = []
        with self._catalog.reading() as view:
            for name, size_bytes in view.blob_sizes():
                if found.get(name.blob_number) == size_bytes:
                    kept.add(name.blob_number)
                else:
                    damaged.append(name)
        self._delete_versions(damaged)
        if not self.store.capabilities.is_shared:
            self._remove(list(found.keys() - kept))
        for name in damaged:
            self.damage.add(name.key, "its file is missing or has another length")

    def _with_idle_closed(self, action: Callable[[], T]) -> T:
        """Do what opens a blob; where this process may open no more, close idle ones first."""
        try:
            return action()
        except Busy:
            self._cache.clear()
            return action()


def _new_blob(put: StagedPut, modified_s: float) -> NewBlob:
    assert isinstance(put.staged, StagedBlob)
    return NewBlob.of(put, put.staged, modified_s)
