"""One file per object below a data directory, and an SQLite index that says what the files are.

The plain reference engine. Rules:

- A put is durable in this order: the bytes, their files' names, the index. Only the index makes an
  object visible, and one transaction makes all objects of a commit visible together.
- A file is written once and never changed. An overwrite is another file; the old one is unlinked
  when the index no longer names it, and who has it open reads on.
- A file that no index row names is removed when the engine opens, and a row whose file is missing
  or has another length is dropped then.
- Every byte that is read is checked against the checksum of its block. An object that fails is
  dropped from the index, that very version and no newer one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec

from objectcache_schemas.errors import DamagedData
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.operators.engine_status import EngineStatus
from objectcache_schemas.records import (
    BucketConfiguration,
    BucketInfo,
    Condition,
    ObjectAttributes,
    ObjectInfo,
)
from objectcache_storage_server.engines.base import (
    ALWAYS,
    CHECKSUM_BLOCK_BYTES,
    BucketTotals,
    Committed,
    Engine,
    EngineCapabilities,
    OpenObjects,
    Placement,
    Read,
    Staged,
    StagedPut,
    check_unchanged,
)
from objectcache_storage_server.engines.block_checksums import block_checksum
from objectcache_storage_server.engines.bucket_rules import (
    bucket_exists,
    bucket_not_empty,
    check_layout_change,
    no_such_key,
)
from objectcache_storage_server.engines.commit_rules import check_batch
from objectcache_storage_server.engines.data_folders import (
    lock_folder,
    raise_open_files_limit,
    sync_folder,
)
from objectcache_storage_server.engines.files.index_records import BucketRow, Version, VersionName
from objectcache_storage_server.engines.files.object_files import ObjectFiles
from objectcache_storage_server.engines.files.open_files import FileDamage, OpenFile, OpenFileCache
from objectcache_storage_server.engines.files.sqlite_index import FilesIndex
from objectcache_storage_server.engines.files.staged_files import FilesStaged
from objectcache_storage_server.engines.files.store_commit import FilesCommit, NewVersion
from objectcache_storage_server.engines.flush_latch import FlushLatch
from objectcache_storage_server.engines.key_order import key_bytes
from objectcache_storage_server.engines.system_errors import as_our_error, translated

T = TypeVar("T")

DELETE_KEYS = 256  # of one transaction, which bounds what a delete on a full device needs

log = logging.getLogger("objectcache.storage_server.engines.files")


class _FileGone(Exception):
    """The index named a file that is not there."""

    def __init__(self, version: Version) -> None:
        super().__init__(version.object_id)
        self.version = version


class FilesOpenObjects(OpenObjects):
    """Pinned open files."""

    def __init__(self, engine: FilesEngine, files: Sequence[OpenFile | None]) -> None:
        self._engine = engine
        self._files = list(files)
        self.infos = [file.version.info if file else None for file in files]

    def placements(self) -> Sequence[Placement]:
        assert None not in self._files, "an object is not stored"
        return [Placement(source, 0) for source in range(len(self._files))]

    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        # A slice that is one checksum block is read and checked right here: a layer of a prefix is
        # hundreds of them, and a call for each would cost as much as a fifth of its read.
        assert buffer.itemsize == 1
        files, preadv, checksum_of = self._files, os.preadv, block_checksum
        file = None
        try:
            for source, offset_bytes, length_bytes, landing in reads:
                file = files[source]
                assert file is not None
                target = buffer[landing : landing + length_bytes]
                assert len(target) == length_bytes
                index, ragged = divmod(offset_bytes, file.block_bytes)
                if length_bytes == file.block_bytes and not ragged:
                    try:
                        read_bytes = preadv(file.file_descriptor, (target,), offset_bytes)
                    except OSError:
                        read_bytes = 0  # read again below, which says what is wrong
                    if read_bytes == length_bytes and checksum_of(target) == file.checksums[index]:
                        continue
                file.read(offset_bytes, target)
        except (FileDamage, OSError) as error:
            assert file is not None
            raise self._engine.read_failed(file, error) from error

    def close(self) -> None:
        files, self._files = self._files, []
        self._engine.unpin({id(file): file for file in files if file is not None}.values())


class FilesEngine(Engine):
    """Objects as files, `open_objects_max` of them kept open for the next read.

    The constructor raises this process's limit on open files, recovers from a crash, and raises
    `Unavailable` where another process uses `data_dir` or it cannot be used.
    """

    capabilities = EngineCapabilities(name="files", persistent=True)

    def __init__(
        self, data_dir: Path, open_objects_max: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._data_dir = data_dir
        self._latch = FlushLatch()
        self._staged: set[FilesStaged] = set()
        self._damaged_lock = threading.Lock()
        self._damaged_count = 0
        # Half is left for sockets, for puts, and for files that are pinned but no longer cached.
        self._cache = OpenFileCache(min(open_objects_max, raise_open_files_limit() // 2))
        with contextlib.ExitStack() as opened:
            with translated(f"create {data_dir}", data_dir):
                data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(data_dir.parent)
            opened.callback(os.close, lock_folder(data_dir))
            self._index = FilesIndex(data_dir / "index.sqlite3", self._count_damaged, self._latch)
            opened.callback(self._index.close)
            self._files = ObjectFiles(data_dir / "objects", self._latch)
            opened.callback(self._files.close)
            with translated("flush the data directory", data_dir):
                sync_folder(data_dir)
            self._recover()
            self._opened = opened.pop_all()

    def __repr__(self) -> str:
        return f"<FilesEngine {self._data_dir} {self._cache}>"

    # --- buckets ---

    def create_bucket(self, bucket: BucketInfo) -> None:
        with self._index.writing() as change:
            existing = change.find_bucket(bucket.name)
            if existing is not None:
                raise bucket_exists(existing.info, bucket)
            change.add_bucket(bucket)

    def bucket(self, name: str) -> BucketInfo:
        return self._bucket_row(name).info

    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        with self._index.reading() as view:
            return view.buckets(after, limit)

    def delete_bucket(self, name: str) -> None:
        with self._index.writing() as change:
            number = change.bucket(name).number
            if not change.is_empty(number):
                raise bucket_not_empty(name)
            change.remove_bucket(number)

    def set_layout(self, name: str, layout: KvLayout) -> None:
        with self._index.writing() as change:
            bucket = change.bucket(name)
            misfit_key = change.key_of_other_size(bucket.number, layout.chunk_bytes)
            check_layout_change(bucket.info, layout, misfit_key)
            change.replace_bucket(
                bucket.number, msgspec.structs.replace(bucket.info, layout=layout)
            )

    def configure_bucket(self, name: str, configuration: BucketConfiguration) -> None:
        with self._index.writing() as change:
            bucket = change.bucket(name)
            changed = msgspec.structs.replace(bucket.info, configuration=configuration)
            change.replace_bucket(bucket.number, changed)

    def usage(self, name: str) -> BucketTotals:
        with self._index.reading() as view:
            return view.totals(view.bucket(name).number)

    # --- writing ---

    def stage(
        self, bucket: str, key: str, checksum_block_bytes: int = CHECKSUM_BLOCK_BYTES
    ) -> Staged:
        key_bytes(key)
        self._bucket_row(bucket)
        staged = self._with_descriptors(
            "create an object's file",
            self._data_dir,
            lambda: FilesStaged(
                self._files, bucket, key, checksum_block_bytes, self._staged.discard
            ),
        )
        self._staged.add(staged)
        return staged

    def commit(self, puts: Sequence[StagedPut], condition: Condition = ALWAYS) -> list[Committed]:
        check_batch(puts)
        try:
            return self._commit(puts, condition) if puts else []
        finally:
            for put in puts:
                put.staged.discard()  # of no effect on what was stored

    def _commit(self, puts: Sequence[StagedPut], condition: Condition) -> list[Committed]:
        modified_s = self._clock()
        new = [NewVersion.of(put, modified_s) for put in puts]
        commit = FilesCommit(self._index, self._files, self._cache, new, condition)
        committed = commit.carry_out()
        for key, reason in commit.damaged.items():
            self._count_damaged(key, reason)
        self._remove_files(commit.replaced_ids)
        return committed

    def replace_attributes(
        self, bucket: str, seen: ObjectInfo, attributes: ObjectAttributes
    ) -> ObjectInfo:
        number = self._bucket_row(bucket).number
        with self._cache.changing(number, [seen.key]), self._index.writing() as change:
            version = change.versions(number, [seen.key]).get(seen.key)
            if version is None:
                raise no_such_key(seen.key)
            check_unchanged(version.info, seen)
            info = msgspec.structs.replace(version.info, attributes=attributes)
            change.add([replace(version, info=info)])
            return info

    def delete(self, bucket: str, keys: Sequence[str]) -> int:
        number = self._bucket_row(bucket).number
        return sum(
            len(self._delete(number, keys[begin : begin + DELETE_KEYS]))
            for begin in range(0, len(keys), DELETE_KEYS)
        )

    def expire(self, bucket: str, infos: Sequence[ObjectInfo]) -> BucketTotals:
        number = self._bucket_row(bucket).number
        seen = {info.key: info for info in infos}
        keys = list(seen)
        gone: list[Version] = []
        for begin in range(0, len(keys), DELETE_KEYS):
            some = keys[begin : begin + DELETE_KEYS]
            gone += self._delete(number, some, lambda found: found.info == seen[found.info.key])
        return BucketTotals(len(gone), sum(version.info.size_bytes for version in gone))

    def _delete(
        self,
        bucket_number: int,
        keys: Sequence[str],
        is_wanted: Callable[[Version], bool] = lambda version: True,
    ) -> list[Version]:
        with self._cache.changing(bucket_number, keys):
            deleted = self._index.delete(bucket_number, keys, is_wanted)
        self._remove_files(version.object_id for version in deleted)
        self._index.refill_reserve()
        return deleted

    # --- reading ---

    def stat(self, bucket: str, key: str) -> ObjectInfo:
        with self._index.reading() as view:
            version = view.versions(view.bucket(bucket).number, [key]).get(key)
        if version is None:
            raise no_such_key(key)
        return version.info

    def match(self, bucket: str, keys: Sequence[str]) -> int:
        with self._index.reading() as view:
            return view.match(view.bucket(bucket).number, keys)

    def open_many(
        self, bucket: str, keys: Sequence[str], *, are_prefix: bool = False
    ) -> OpenObjects:
        number = self._bucket_row(bucket).number
        while True:
            try:
                files = self._pin(number, keys)
            except _FileGone as gone:  # deleted since it was looked up, or damaged; look again
                self._drop_damaged(gone.version, "its file is missing")
            else:
                return FilesOpenObjects(self, [files.get(key) for key in keys])

    def scan(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[ObjectInfo]:
        with self._index.reading() as view:
            return view.scan(view.bucket(bucket).number, prefix, start_after, limit)

    def _bucket_row(self, name: str) -> BucketRow:
        with self._index.reading() as view:
            return view.bucket(name)

    def _pin(self, bucket_number: int, keys: Sequence[str]) -> dict[str, OpenFile]:
        """Files of what is stored of `keys`, all as of one moment; raises `_FileGone`."""
        epoch, pinned = self._cache.pin(bucket_number, keys)
        missing = [key for key in keys if key not in pinned]
        if not missing:
            return pinned
        try:
            versions = self._look_up(bucket_number, missing)
            if pinned and not self._cache.is_current(epoch):  # these are of different moments
                self.unpin(pinned.values())
                pinned = {}
                versions = self._look_up(bucket_number, keys)
            opened: list[OpenFile] = []
            for key, version in versions.items():
                pinned[key] = self._open_file(version)
                opened.append(pinned[key])
        except BaseException:
            self.unpin(pinned.values())
            raise
        self._cache.add(opened, epoch)
        return pinned

    def _look_up(self, bucket_number: int, keys: Iterable[str]) -> dict[str, Version]:
        with self._index.reading() as view:
            return view.versions(bucket_number, keys)

    def _open_file(self, version: Version) -> OpenFile:
        path = self._files.path(version.object_id)
        try:
            return OpenFile(path, version)
        except FileNotFoundError as error:
            raise _FileGone(version) from error
        except OSError:
            return self._with_descriptors("open an object", path, lambda: OpenFile(path, version))

    def unpin(self, files: Iterable[OpenFile]) -> None:
        """Let files go that `open_many` pinned."""
        self._cache.unpin(files)

    # --- damage ---

    @property
    def damaged_count(self) -> int:
        return self._damaged_count

    @property
    def flush_failure(self) -> str:
        return self._latch.failure

    def read_failed(self, file: OpenFile, error: FileDamage | OSError) -> Exception:
        """What a failed read raises; damage drops the version that was read."""
        version = file.version
        if isinstance(error, OSError):
            return as_our_error(error, "read an object", self._files.path(version.object_id))
        if not self._latch.failure:
            self._drop_damaged(version, str(error))
        return DamagedData(f"{version.info.key!r} is damaged: {error}", key=version.info.key)

    def _drop_damaged(self, version: Version, reason: str) -> None:
        key = version.info.key
        with self._cache.changing(version.bucket_number, [key]):
            dropped = self._index.delete_versions([version.name])
        if dropped:  # else it was replaced, deleted or dropped meanwhile
            self._count_damaged(key, reason)
            self._remove_files([version.object_id])

    def _count_damaged(self, key: str, reason: str) -> None:
        with self._damaged_lock:
            self._damaged_count += 1
        log.error("dropped the damaged object %r: %s", key, reason)

    # --- the engine itself ---

    def status(self) -> EngineStatus:
        # Objects are not counted: SQLite walks the whole table for that.
        return EngineStatus(
            engine=self.capabilities.name,
            damaged=self._damaged_count,
            flush_failure=self.flush_failure,
        )

    def close(self) -> None:
        for staged in list(self._staged):
            staged.discard()
        self._cache.clear()
        self._opened.close()

    def _recover(self) -> None:
        """Make index and files agree: drop rows without their file, remove files without a row."""
        found = self._files.sizes()
        kept: set[int] = set()
        damaged: list[VersionName] = []
        with self._index.reading() as view:
            for name, size_bytes in view.file_sizes():
                if found.get(name.object_id) == size_bytes:
                    kept.add(name.object_id)
                else:
                    damaged.append(name)
        self._index.delete_versions(damaged)
        self._remove_files(found.keys() - kept)
        self._files.start_ids_after(max(found, default=0))
        for name in damaged:
            self._count_damaged(name.key, "its file is missing or has another length")

    def _remove_files(self, object_ids: Iterable[int]) -> None:
        for object_id in object_ids:
            try:
                self._files.remove(object_id)
            except OSError as error:
                log.warning("%s stays until the next start: %s", self._files.path(object_id), error)

    def _with_descriptors(self, operation: str, path: str | Path, action: Callable[[], T]) -> T:
        """Do what opens a file; where descriptors have run out, close idle files and try again."""
        try:
            return action()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise as_our_error(error, operation, path) from error
        self._cache.clear()
        with translated(operation, path):
            return action()
