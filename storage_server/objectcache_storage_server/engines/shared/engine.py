"""The engine over a store that several storage servers share. docs/shared_engine.md says what lies
where, and in which order it becomes durable.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Sequence

import msgspec

from objectcache_schemas.errors import DamagedData, Unsupported
from objectcache_schemas.operators.engine_status import CheckpointTaken, CheckReport, EngineStatus
from objectcache_schemas.records import (
    BucketInfo,
    BucketPolicy,
    Condition,
    Freshness,
    ObjectAttributes,
    ObjectInfo,
    Verification,
)
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
from objectcache_storage_server.engines.block_checksums import (
    BlockHasher,
    slice_block_bytes,
    stored_block_bytes,
)
from objectcache_storage_server.engines.bucket_rules import no_such_key
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.catalog_engine import (
    CALL_S_MAX,
    CatalogEngine,
    DamageCount,
)
from objectcache_storage_server.engines.commit_rules import check_batch
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.key_order import key_bytes
from objectcache_storage_server.engines.puts.put_buffers import PutBuffers
from objectcache_storage_server.engines.shared.cache.extent_cache import ExtentCache
from objectcache_storage_server.engines.shared.extents.open_extents import (
    ExtentReader,
    SharedOpenObjects,
)
from objectcache_storage_server.engines.shared.extents.read_sources import lay_out
from objectcache_storage_server.engines.shared.extents.staged_objects import (
    JoinedExtents,
    SharedStaged,
    StagedAlone,
    can_join,
)
from objectcache_storage_server.engines.shared.extents.staged_prefix import SharedStagedPrefix
from objectcache_storage_server.engines.shared.extents.write_extents import ObjectWriter
from objectcache_storage_server.engines.shared.judge_shared import NewShared, SharedCommit
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.shared_catalog import (
    SharedChange,
    SharedView,
    UnknownOutcome,
)
from objectcache_storage_server.engines.shared.upkeep.check_shared import check_shared
from objectcache_storage_server.engines.shared.upkeep.describe_shared import shared_status
from objectcache_storage_server.engines.shared.upkeep.upkeep_thread import SharedUpkeep
from objectcache_storage_server.engines.shared.versions import SharedVersion
from objectcache_storage_server.engines.stores.shared_store import SharedStore

DELETE_KEYS = 1024  # of one record
HASH_PIECE_BYTES = 4 * 1024 * 1024  # read at a time to compare bytes
OBJECTS_IN_MEMORY_MIN = 4  # of the store, that puts may gather, whatever the settings say


class SharedEngine(CatalogEngine[SharedVersion], ExtentReader):
    """Objects as extents of a store, under keys of a catalog that other servers change, too."""

    def __init__(
        self,
        catalog: LogCatalog,
        store: SharedStore,
        upkeep: SharedUpkeep,
        put_buffer_bytes_max: int,
        flush_latch: FlushLatch,
        close_opened: Callable[[], None],
        clock: Callable[[], float] = time.time,
        call_s_max: float = CALL_S_MAX,
        cache: ExtentCache | None = None,
    ) -> None:
        """`close_opened` closes upkeep, catalog, store and cache, and what else the caller has
        opened for them. `call_s_max`: what a call may take of the store's time, and a put wait for
        memory.
        """
        super().__init__(flush_latch, DamageCount())
        capabilities = store.capabilities
        self.capabilities = EngineCapabilities(
            f"shared-{capabilities.name}",
            queue_depth=capabilities.queue_depth,
            read_bytes=capabilities.object_bytes_max,
        )
        self.store = store
        self.cache = cache
        self.upkeep = upkeep
        self._catalog = catalog
        self._clock = clock
        least_bytes = OBJECTS_IN_MEMORY_MIN * capabilities.object_bytes_max
        buffers = PutBuffers(max(put_buffer_bytes_max, least_bytes))
        self._writer = ObjectWriter(
            store, buffers, lambda: catalog.writer, call_s_max, upkeep.evictor, cache
        )
        self._samples = itertools.count()
        self._close_opened = close_opened

    def __repr__(self) -> str:
        return f"<SharedEngine {self._catalog!r}>"

    @property
    def catalog(self) -> LogCatalog:
        return self._catalog

    def deadline_s(self) -> float:
        return self._writer.deadline_s()

    # --- buckets ---

    def bucket_row(self, name: str) -> BucketRow:
        """A bucket as this server knows it; one that it does not know is looked for in the log."""
        with self._catalog.reading() as view:
            row = view.find_bucket(name)
        if row is not None:
            return row
        self._catalog.follow(self.deadline_s())
        return super().bucket_row(name)

    def fresh_bucket(self, name: str) -> BucketInfo:
        self._catalog.follow(self.deadline_s())
        with self._catalog.reading() as view:
            return view.bucket(name).info

    def set_policy(self, name: str, policy: BucketPolicy) -> None:
        if policy.encoding is not None:
            self.bucket(name)
            raise Unsupported(f"engine {self.capabilities.name} encodes nothing; local has that")
        self.change_bucket(name, policy=policy)

    def usage(self, name: str) -> BucketTotals:
        number = self.bucket_row(name).number
        with self._catalog.reading() as view:
            return view.totals(number)

    # --- writing ---

    def stage(
        self, bucket: str, key: str, checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES
    ) -> Staged:
        key_bytes(key)
        self.bucket_row(bucket)
        return StagedAlone(self._writer, bucket, key, checksum_block_bytes)

    def stage_prefix(self, bucket: str, shape: PrefixShape) -> StagedPrefix:
        for key in shape.keys:
            key_bytes(key)
        slice_block_bytes(shape.slice_bytes)
        self.bucket_row(bucket)
        return SharedStagedPrefix(self._writer, bucket, shape)

    def stage_joined(
        self,
        bucket: str,
        key: str,
        source_bucket: str,
        sources: Sequence[ObjectInfo],
        checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES,
    ) -> Staged | None:
        key_bytes(key)
        self.bucket_row(bucket)
        with self.looking_up(source_bucket) as (view, row):
            found = view.versions(row.number, [source.key for source in sources])
            shapes = view.shapes({name for version in found.values() for name in version.extents})
        versions = [found.get(source.key) for source in sources]
        stored = [version for version in versions if version is not None]
        if [version.info for version in stored] != list(sources):
            return None  # the copy says which
        if not can_join(stored, shapes, stored_block_bytes(checksum_block_bytes)):
            return None
        return JoinedExtents(bucket, key, checksum_block_bytes, stored)

    def commit(self, puts: Sequence[StagedPut], condition: Condition = ALWAYS) -> list[Committed]:
        check_batch(puts)
        staged = [_staged(put) for put in puts]
        if not staged:
            return []
        try:
            self.flush_latch.check()
            commit = self._new_commit(puts, staged, condition)
            if commit.judge_first(self.deadline_s()):  # while the store still writes
                for each in staged:
                    each.finish()
                commit.carry_out(self.deadline_s())
            self._catalog.note_used(commit.kept_extents)
            return commit.outcome
        except UnknownOutcome:  # a record that names them may yet be found
            for each in staged:
                each.keep()
            raise
        finally:
            for each in staged:
                each.discard()  # of no effect on what was stored

    def _new_commit(
        self, puts: Sequence[StagedPut], staged: Sequence[SharedStaged], condition: Condition
    ) -> SharedCommit:
        for each in staged:
            each.begin_finish()
        modified_s = self._clock()
        new_object = NewShared.of  # looked up once: it takes as long as the call
        new = [new_object(*pair, modified_s) for pair in zip(puts, staged, strict=True)]
        make_room_in = self.upkeep.evictor.make_room_in
        return SharedCommit(self._catalog, self._hash_stored, make_room_in, new, condition)

    def replace_attributes(
        self, bucket: str, seen: ObjectInfo, attributes: ObjectAttributes
    ) -> ObjectInfo:
        def act(change: SharedChange) -> ObjectInfo:
            number = change.bucket(bucket).number
            version = change.versions(number, [seen.key]).get(seen.key)
            if version is None:
                raise no_such_key(seen.key)
            check_unchanged(version.info, seen)
            change.replace_attributes(version.name, attributes)
            return msgspec.structs.replace(version.info, attributes=attributes)

        return self._catalog.change(act, self.deadline_s())

    def delete(self, bucket: str, keys: Sequence[str]) -> int:
        self.bucket_row(bucket)
        count = 0
        for begin in range(0, len(keys), DELETE_KEYS):
            some = keys[begin : begin + DELETE_KEYS]

            def act(change: SharedChange, some: Sequence[str] = some) -> int:
                found = change.versions(change.bucket(bucket).number, some).values()
                return len(change.delete([version.name for version in found]))

            count += self._catalog.change(act, self.deadline_s())
        return count

    def expire(self, bucket: str, infos: Sequence[ObjectInfo]) -> BucketTotals:
        self.bucket_row(bucket)
        gone: list[SharedVersion] = []
        for begin in range(0, len(infos), DELETE_KEYS):
            seen = {info.key: info for info in infos[begin : begin + DELETE_KEYS]}

            def act(
                change: SharedChange, seen: dict[str, ObjectInfo] = seen
            ) -> list[SharedVersion]:
                found = change.versions(change.bucket(bucket).number, seen).values()
                names = {each.name for each in found if each.info == seen[each.info.key]}
                return change.delete(names - change.pinned(names))

            gone += self._catalog.change(act, self.deadline_s())
        return BucketTotals(len(gone), sum(version.info.size_bytes for version in gone))

    def pin(self, bucket: str, keys: Sequence[str], pinned: bool) -> int:
        def act(change: SharedChange) -> int:
            found = change.versions(change.bucket(bucket).number, keys).values()
            return change.set_pinned([version.name for version in found], pinned)

        return self._catalog.change(act, self.deadline_s())

    # --- reading ---

    @contextlib.contextmanager
    def looking_up(self, bucket: str) -> Generator[tuple[SharedView, BucketRow], None, None]:
        """One moment: of what this server has replayed, or for a bucket whose reads are fresh, not
        before this call.
        """
        with self._catalog.reading() as view:
            row = view.find_bucket(bucket)
            if row is not None and _is_indexed(row):
                yield view, row
                return
        self._catalog.follow(self.deadline_s())
        with self._catalog.reading() as view:
            yield view, view.bucket(bucket)

    def stat_at_hand(self, bucket: str, key: str) -> ObjectInfo | None:
        with self._catalog.reading() as view:
            row = view.find_bucket(bucket)
            found = None if row is None else view.versions(row.number, [key]).get(key)
        return None if found is None else found.info

    def open_many(
        self, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
    ) -> OpenObjects:
        with self.looking_up(bucket) as (view, row):
            found = view.versions(row.number, keys)
            versions = [found.get(key) for key in keys]
            opened = self._open(versions, view, row.info.policy.verification)
        self._catalog.note_used({name for version in found.values() for name in version.extents})
        return opened

    def _open(
        self,
        versions: Sequence[SharedVersion | None],
        view: SharedView,
        verification: Verification,
    ) -> SharedOpenObjects:
        stored = [version for version in versions if version is not None]
        shapes = view.shapes({name for version in stored for name in version.extents})
        sources, placements = lay_out(stored, shapes)
        return SharedOpenObjects(
            self, versions, sources, placements, verification, next(self._samples)
        )

    @contextlib.contextmanager
    def scanning(
        self, bucket: str
    ) -> Generator[Callable[[str, str, int], list[ObjectInfo]], None, None]:
        with self.looking_up(bucket) as (view, row):
            number = row.number
            yield lambda prefix, start_after, limit: view.scan(number, prefix, start_after, limit)

    def _hash_stored(self, version: SharedVersion, block_bytes: int) -> array[int]:
        """Checksums of a stored version's blocks of another size."""
        hasher = BlockHasher(block_bytes)
        with self._catalog.reading() as view:
            opened = self._open([version], view, Verification.FULL)
        size_bytes = version.info.size_bytes
        piece = memoryview(bytearray(min(HASH_PIECE_BYTES, size_bytes)))
        for offset_bytes in range(0, size_bytes, HASH_PIECE_BYTES):
            part = piece[: size_bytes - offset_bytes]
            opened.read_into(0, offset_bytes, part)
            hasher.update(part)
        return hasher.finish()

    # --- damage ---

    def drop_damaged(self, versions: Iterable[SharedVersion], reason: str) -> Exception:
        names = [version.name for version in versions]

        def act(change: SharedChange) -> list[SharedVersion]:
            return change.delete(names)

        dropped = self._catalog.change(act, self.deadline_s())
        for version in dropped:
            self.damage.add(version.info.key, reason)
        if dropped:
            key = dropped[0].info.key
            return DamagedData(f"{key!r} is damaged: {reason}", key=key)
        return no_such_key(names[0].key)

    # --- the engine itself ---

    def status(self) -> EngineStatus:
        return shared_status(
            self.capabilities.name,
            self._catalog,
            self.upkeep,
            self.damaged_count,
            self.flush_failure,
            self.cache.status() if self.cache is not None else None,
        )

    @property
    def store_failure(self) -> str:
        return self._catalog.store_failure

    def check(self, repair: bool, on_progress: Callable[[CheckReport], bool]) -> CheckReport:
        return check_shared(self, self._catalog, repair, on_progress)

    def take_checkpoint(self) -> CheckpointTaken:
        return self._catalog.take_checkpoint()

    def check_room(self, size_bytes: int) -> None:
        self.upkeep.evictor.check_size(size_bytes)

    def close(self) -> None:
        self._writer.close()
        self._close_opened()


def _staged(put: StagedPut) -> SharedStaged:
    assert isinstance(put.staged, SharedStaged)
    return put.staged


def _is_indexed(row: BucketRow) -> bool:
    """Whether reads are answered from the index at once: by its policy, else by its kind."""
    reads = row.info.policy.reads
    if reads is None:
        return row.info.layout is not None
    return reads is Freshness.INDEXED
