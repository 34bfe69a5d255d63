"""The local engine: extents on a volume, an LMDB index, two paths to the device.

docs/local_engine.md says how bytes lie and in which order they become durable. Here are the methods
of the engine contract, each a few steps of what the modules beside this one do.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_schemas.operators.engine_status import CheckReport, EngineStatus
from objectcache_schemas.records import (
    BucketInfo,
    BucketPolicy,
    Condition,
    Durability,
    ObjectAttributes,
    ObjectInfo,
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
    slice_block_bytes,
    stored_block_bytes,
)
from objectcache_storage_server.engines.bucket_rules import (
    no_such_key,
)
from objectcache_storage_server.engines.catalog_engine import CatalogEngine, DamageCount
from objectcache_storage_server.engines.commit_rules import check_batch
from objectcache_storage_server.engines.disk.data_folders import owned_folder, sync_folder
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.key_order import key_bytes
from objectcache_storage_server.engines.local.commits.commit_group import CommitGroups
from objectcache_storage_server.engines.local.commits.judged_commit import LocalCommit, NewLocal
from objectcache_storage_server.engines.local.index.lmdb_index import IndexChange, LocalIndex
from objectcache_storage_server.engines.local.objects.stored_objects import (
    DELETE_KEYS,
    StoredObjects,
)
from objectcache_storage_server.engines.local.puts.encode_extents import RowEncoder, row_encoder
from objectcache_storage_server.engines.local.puts.join_objects import JoinedRuns, can_join
from objectcache_storage_server.engines.local.puts.staged_prefix import LocalStagedPrefix
from objectcache_storage_server.engines.local.puts.staged_runs import LocalStaged, StagedRun
from objectcache_storage_server.engines.local.puts.write_paths import WritePaths
from objectcache_storage_server.engines.local.puts.writer_space import WriterSpace
from objectcache_storage_server.engines.local.reads.hold_versions import open_sources
from objectcache_storage_server.engines.local.reads.path_use import PathUse
from objectcache_storage_server.engines.local.reads.small_reads import read_resident
from objectcache_storage_server.engines.local.records import Version, VersionName
from objectcache_storage_server.engines.local.space.extent_geometry import split_into_extents
from objectcache_storage_server.engines.local.space.holdings import Holdings
from objectcache_storage_server.engines.local.upkeep.check_store import check_objects
from objectcache_storage_server.engines.local.upkeep.describe_store import engine_status
from objectcache_storage_server.engines.local.upkeep.evict_chunks import Evictor
from objectcache_storage_server.engines.local.upkeep.move_chunks import Compactor
from objectcache_storage_server.engines.local.upkeep.recover_store import recover
from objectcache_storage_server.engines.local.upkeep.upkeep_thread import Upkeep
from objectcache_storage_server.engines.local.volumes.volume import Volume
from objectcache_storage_server.engines.puts.put_buffers import PutBuffers

WRITER_THREADS = 8  # puts whose bytes are on their way to the device

log = logging.getLogger("objectcache.storage_server.engines.local")


class LocalEngine(CatalogEngine[Version]):
    """Opens the store below `data_dir`, recovering from a crash, and starts its upkeep.

    Raises `Unavailable` where another process uses the store, or it cannot be used.
    """

    capabilities = EngineCapabilities(name="local")

    def __init__(
        self,
        data_dir: Path,
        settings: StorageSettings,
        open_volume: Callable[[Path, StorageSettings], Volume],
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(FlushLatch(), DamageCount())
        self.settings = settings
        self._clock = clock
        self._data_dir = data_dir
        with contextlib.ExitStack() as opened:
            with translated(f"create {data_dir}", data_dir):
                data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(data_dir.parent)
            opened.enter_context(owned_folder(data_dir, self.flush_latch))
            _check_engine(data_dir)
            self.index = LocalIndex(
                data_dir / "index", settings.index_bytes_max, self.damage.add, self.flush_latch
            )
            opened.callback(self.index.close)
            with translated("open the data files", data_dir):
                self.volume = open_volume(data_dir, settings)
                sync_folder(data_dir)
            opened.callback(self.volume.close)
            self.holdings = Holdings(self.volume, self.flush_latch)
            self.path_use = PathUse(self.volume, settings.overlap)
            self.stored = stored = StoredObjects(
                self.index,
                self.holdings,
                self.volume,
                self.path_use,
                self.flush_latch,
                self.damage,
            )
            self.evictor = Evictor(stored, settings)
            self._extent_bytes_max = min(settings.extent_bytes_max, self.volume.segment_bytes)
            buffers = PutBuffers(settings.put_buffer_bytes_max)
            writers = ThreadPoolExecutor(WRITER_THREADS, "objectcache-write")
            opened.callback(writers.shutdown)
            evict = self.evictor.evict_for_writer
            write_paths = WritePaths(self.volume, may_leave_out=settings.page_cache_bytes < 0)
            note_put = self.path_use.note_put
            self._space = WriterSpace(self.holdings, evict, buffers, writers, write_paths, note_put)
            self._commit_groups = CommitGroups(stored)
            recover(stored)
            moving_space = WriterSpace(
                self.holdings, lambda _: 0, buffers, writers, write_paths, lambda: None
            )
            compactor = Compactor(
                stored, moving_space, settings, self._extent_bytes_max, clock, self.row_encoder
            )
            self.upkeep = Upkeep(stored, self.evictor, compactor, settings, clock)
            opened.callback(self.upkeep.close)
            self._opened = opened.pop_all()

    def __repr__(self) -> str:
        return f"<LocalEngine {self._data_dir}, {len(self.holdings.objects)} objects>"

    @property
    def catalog(self) -> LocalIndex:
        return self.index

    # --- buckets ---

    def set_policy(self, name: str, policy: BucketPolicy) -> None:
        self.change_bucket(name, policy=policy)
        self.upkeep.wake()

    def usage(self, name: str) -> BucketTotals:
        return self.holdings.totals(self.bucket_row(name).number)

    # --- writing ---

    def stage(
        self, bucket: str, key: str, checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES
    ) -> Staged:
        key_bytes(key)
        self.bucket_row(bucket)
        run_bytes_max = self._extent_bytes_max
        return StagedRun(self._space, bucket, key, checksum_block_bytes, run_bytes_max)

    def stage_prefix(self, bucket: str, shape: PrefixShape) -> StagedPrefix:
        for key in shape.keys:
            key_bytes(key)
        slice_block_bytes(shape.slice_bytes)
        row = self.bucket_row(bucket)
        if shape.chunk_bytes > self._extent_bytes_max:
            return self._new_prefix_apart(bucket, shape)
        return self._new_prefix(bucket, shape, self.row_encoder(row.info))

    @staticmethod
    def row_encoder(bucket: BucketInfo) -> RowEncoder | None:
        """What encodes the chunks of a bucket; None where they are stored plain."""
        return row_encoder(bucket)

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
        with self.holdings.looking_up(), self.index.reading() as view:
            row = view.bucket(source_bucket)
            found = view.versions(row.number, [source.key for source in sources])
            slots = self.holdings.slots_of(
                {number for version in found.values() for number in version.extents}
            )
        versions = [found.get(source.key) for source in sources]
        if any(v is None or v.info != s for v, s in zip(versions, sources, strict=True)):
            return None  # the copy says which
        # Asynchronous ones may not be on the device, where the object's bucket wants it to be.
        if row.info.policy.durability is not Durability.SYNC:
            return None
        stored = [version for version in versions if version is not None]
        if not can_join(stored, stored_block_bytes(checksum_block_bytes), slots):
            return None
        return JoinedRuns(bucket, key, checksum_block_bytes, stored)

    def _new_prefix_apart(self, bucket: str, shape: PrefixShape) -> StagedPrefix:
        """Chunks of more than an extent, each on its own."""
        prefix = super().stage_prefix(bucket, shape)
        parent_key = shape.parent_key
        for staged in prefix.staged:
            assert isinstance(staged, StagedRun)
            staged.come_with_chunks(parent_key)
            parent_key = staged.key
        return prefix

    def _new_prefix(
        self, bucket: str, shape: PrefixShape, encoder: RowEncoder | None
    ) -> LocalStagedPrefix:
        extents = split_into_extents(
            len(shape.keys),
            shape.num_layers,
            shape.slice_bytes,
            self.settings.extent_row_bytes,
            self._extent_bytes_max,
            encoded=encoder is not None,
        )
        return LocalStagedPrefix(
            self._space, bucket, shape, extents, encoder, self._extent_bytes_max
        )

    def commit(self, puts: Sequence[StagedPut], condition: Condition = ALWAYS) -> list[Committed]:
        check_batch(puts)
        if not puts:
            return []
        try:
            modified_s = self._clock()
            new = [_new_object(put, modified_s) for put in puts]
            commit = LocalCommit(self.stored, self.evictor.make_room_in, new, condition)
            commit.prepare()
            self._commit_groups.store(commit)
        finally:
            for put in puts:
                put.staged.discard()  # of no effect on what was stored
        for key, reason in commit.judge.damaged.items():
            self.damage.add(key, reason)
        self.flush_latch.check()
        return commit.outcome()

    def replace_attributes(
        self, bucket: str, seen: ObjectInfo, attributes: ObjectAttributes
    ) -> ObjectInfo:
        with self.stored.changing:
            with self.index.writing(durable=False) as change:
                number = change.bucket(bucket).number
                version = change.versions(number, [seen.key]).get(seen.key)
                if version is None:
                    raise no_such_key(seen.key)
                check_unchanged(version.info, seen)
                info = msgspec.structs.replace(version.info, attributes=attributes)
                # A version of its own in the same place: who is about to move the old one, and
                # would store its attributes, finds it gone.
                changed = msgspec.structs.replace(version, info=info)
                rows = self.holdings.object_rows([version.number])
                change.move(version.name, changed, rows)
            self.holdings.move([changed], [version], rows)
        self.index.sync()
        return info

    def delete(self, bucket: str, keys: Sequence[str]) -> int:
        number = self.bucket_row(bucket).number
        count = 0
        for begin in range(0, len(keys), DELETE_KEYS):
            some = keys[begin : begin + DELETE_KEYS]

            def stored_names(change: IndexChange, some: Sequence[str] = some) -> list[VersionName]:
                return [each.name for each in change.versions(number, some).values()]

            count += len(self.stored.remove(stored_names))
        return count

    def expire(self, bucket: str, infos: Sequence[ObjectInfo]) -> BucketTotals:
        number = self.bucket_row(bucket).number
        gone: list[Version] = []
        for begin in range(0, len(infos), DELETE_KEYS):
            seen = {info.key: info for info in infos[begin : begin + DELETE_KEYS]}

            def unchanged(
                change: IndexChange, seen: dict[str, ObjectInfo] = seen
            ) -> list[VersionName]:
                stored = change.versions(number, seen).values()
                same = [version for version in stored if version.info == seen[version.info.key]]
                rows = self.holdings.object_rows([version.number for version in same])
                pairs = zip(same, rows["is_pinned"].tolist(), strict=True)
                return [version.name for version, is_pinned in pairs if not is_pinned]

            gone += self.stored.remove(unchanged)
        return BucketTotals(len(gone), sum(version.info.size_bytes for version in gone))

    # --- reading ---

    def open_many(
        self, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
    ) -> OpenObjects:
        with self.holdings.looking_up():
            with self.index.reading() as view:
                row = view.bucket(bucket)
                found = view.versions(row.number, keys)
            versions = [found.get(key) for key in keys]
            stored = [version for version in versions if version is not None]
            opened = open_sources(
                self.holdings,
                self.path_use,
                versions,
                row.info.policy.verification,
                self.stored.read_failed,
            )
        self.holdings.used(stored, are_prefix=are_prefix and len(stored) == len(keys))
        return opened

    def stat_at_hand(self, bucket: str, key: str) -> ObjectInfo | None:
        return self.stat(bucket, key)

    def read_small(
        self, bucket: str, key: str, size_bytes_max: int
    ) -> tuple[ObjectInfo, bytes] | None:
        with self.holdings.looking_up():
            with self.index.reading() as view:
                row = view.bucket(bucket)
                version = view.versions(row.number, (key,)).get(key)
            if version is None:
                raise no_such_key(key)
            if version.info.size_bytes > size_bytes_max:
                return None
            verification = row.info.policy.verification
            body = read_resident(version, self.holdings, self.path_use, verification)
        return None if body is None else (version.info, body)

    @contextlib.contextmanager
    def scanning(
        self, bucket: str
    ) -> Generator[Callable[[str, str, int], list[ObjectInfo]], None, None]:
        with self.index.reading() as view:
            number = view.bucket(bucket).number
            yield lambda prefix, start_after, limit: view.scan(number, prefix, start_after, limit)

    def check_room(self, size_bytes: int) -> None:
        capacity_bytes = self.holdings.capacity_bytes()
        if size_bytes > capacity_bytes:
            raise StorageFull(
                f"it has {size_bytes} bytes, the whole store takes {capacity_bytes}; "
                f"{self.volume.growth_remedy()}"
            )

    def pin(self, bucket: str, keys: Sequence[str], pinned: bool) -> int:
        with self.stored.changing:
            with self.index.writing() as change:
                versions = change.versions(change.bucket(bucket).number, keys).values()
                numbers = [version.number for version in versions]
                change.set_pinned(numbers, pinned)
            self.holdings.set_pinned(numbers, pinned)
        return len(numbers)

    # --- the engine itself ---

    def status(self) -> EngineStatus:
        return engine_status(self.capabilities.name, self.stored, self.evictor, self.upkeep)

    def totals(self) -> EngineStatus:
        return engine_status(
            self.capabilities.name, self.stored, self.evictor, self.upkeep, with_extents=False
        )

    def check(self, repair: bool, on_progress: Callable[[CheckReport], bool]) -> CheckReport:
        return check_objects(self.stored, repair, on_progress)

    def close(self) -> None:
        self._opened.close()


def _new_object(put: StagedPut, modified_s: float) -> NewLocal:
    assert isinstance(put.staged, LocalStaged)
    put.staged.finish()
    return NewLocal.of(put, put.staged, modified_s)


def _check_engine(data_dir: Path) -> None:
    """Refuse a directory in which another engine keeps its objects."""
    if (data_dir / "index.sqlite3").exists():
        raise Unavailable(
            f"{data_dir} holds a store of engine files: serve it with "
            "--set storage.engine=files, or give another --data-dir"
        )
    if not (data_dir / "index" / "data.mdb").exists() and any((data_dir / "data").glob("0*")):
        raise Unavailable(
            f"{data_dir}/data holds data files and {data_dir}/index no index, without which nobody "
            "knows what they hold: restore the index, or remove the data files to start empty"
        )
