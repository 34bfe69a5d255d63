"""A folder of files as a blob store: one file a blob, named by its number.

Numbers only grow, and 256 neighbours share a directory, so that a batch touches few directories.
Files hold nothing but the blob's bytes; what they mean is in the catalog. Whoever has a file open
reads on when it is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from objectcache_storage_server.engines.blobs.blob_store import (
    DONE,
    BlobRead,
    BlobStore,
    LostBlob,
    OpenBlob,
    failed,
)
from objectcache_storage_server.engines.disk.data_folders import sync_folder
from objectcache_storage_server.engines.disk.flush_latch import Flushes, FlushLatch
from objectcache_storage_server.engines.disk.system_errors import as_our_error, translated

FOLDERS = 256
SYNC_THREADS = 8  # a device takes several flushes at once; measured 0.38 s to 0.29 s for 896 MiB
_NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

log = logging.getLogger("objectcache.storage_server.engines.files")


class OpenFile(OpenBlob):
    """A file open for reading."""

    __slots__ = ("descriptor",)

    def __init__(self, number: int, descriptor: int) -> None:
        super().__init__(number)
        self.descriptor = descriptor


class FolderBlobStore(BlobStore):
    """Files below one folder. A file is read by the thread that asks, and has no deadline."""

    def __init__(self, root: Path, latch: FlushLatch) -> None:
        self._latch = latch
        self._folder_flushes = Flushes(latch, "the folders of object files")
        self._folders = [str(root / f"{number:02x}") for number in range(FOLDERS)]
        self._root = root
        with translated("create the folders of object files", root):
            root.mkdir(mode=0o700, exist_ok=True)
            for folder in self._folders:
                os.makedirs(folder, mode=0o700, exist_ok=True)
            sync_folder(root)
        self._numbers = itertools.count(1)
        self._written: dict[int, int] = {}  # descriptors by number, of what was not flushed yet
        self._sync_pool = ThreadPoolExecutor(SYNC_THREADS, "objectcache-sync")

    def _path(self, number: int) -> str:
        return f"{self._folder(number)}/{number:016x}"

    def _folder(self, number: int) -> str:
        return self._folders[(number // FOLDERS) % FOLDERS]

    # --- writing ---

    def create(self, deadline_s: float) -> int:
        number = next(self._numbers)
        with translated("create an object's file", self._path(number)):
            self._written[number] = os.open(self._path(number), _NEW_FILE, 0o600)
        return number

    def write(self, number: int, offset_bytes: int, data: memoryview, deadline_s: float) -> None:
        descriptor = self._written[number]
        with translated("write an object", self._path(number)):
            while data:
                written_bytes = os.pwrite(descriptor, data, offset_bytes)
                offset_bytes += written_bytes
                data = data[written_bytes:]

    def flush(self, numbers: Sequence[int], deadline_s: float) -> None:
        """Flush the files and their names. Raises `Unavailable` where this flush or any other has
        failed.
        """
        descriptors = [self._written[number] for number in numbers]
        with self._latch.flushing("object files"):  # each of them is one put's own
            for _ in self._sync_pool.map(os.fdatasync, descriptors):
                pass
        with self._folder_flushes.one():
            for folder in {self._folder(number) for number in numbers}:
                sync_folder(folder)
        self._end_writing(numbers)

    def delete(self, numbers: Iterable[int], deadline_s: float) -> None:
        for number in numbers:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path(number))
            except OSError as error:
                log.warning("%s stays until the next start: %s", self._path(number), error)
            self._end_writing([number])

    def _end_writing(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            descriptor = self._written.pop(number, None)
            if descriptor is not None:
                os.close(descriptor)

    # --- reading ---

    def open(self, number: int) -> OpenBlob:
        path = self._path(number)
        with translated("open an object", path):
            try:
                return OpenFile(number, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except FileNotFoundError as error:
                raise LostBlob(OpenBlob(number), "its file is missing") from error

    def release(self, blobs: Iterable[OpenBlob]) -> None:
        for blob in blobs:
            assert isinstance(blob, OpenFile)
            os.close(blob.descriptor)

    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        for blob, offset_bytes, landing in reads:
            assert isinstance(blob, OpenFile)
            try:
                read_bytes = os.preadv(blob.descriptor, (landing,), offset_bytes)
                if read_bytes != len(landing):
                    _read_rest(blob, offset_bytes, landing, read_bytes)
            except LostBlob as lost:
                return failed(lost)
            except OSError as error:
                if error.errno == errno.EIO:
                    reason = f"the device cannot read it at byte {offset_bytes}"
                    return failed(LostBlob(blob, reason))
                return failed(as_our_error(error, "read an object", self._path(blob.number)))
        return DONE

    # --- the store itself ---

    def sizes(self) -> dict[int, int]:
        """See `BlobStore`. What has no place here is not ours. New numbers follow those found."""
        found: dict[int, int] = {}
        with translated("list the object files", self._root):
            for folder in self._folders:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        number = _number_of(entry.name)
                        if number is not None and self._folder(number) == folder:
                            found[number] = entry.stat(follow_symlinks=False).st_size
        self._numbers = itertools.count(max(found, default=0) + 1)
        return found

    def close(self) -> None:
        self._end_writing(list(self._written))
        self._sync_pool.shutdown()


def _read_rest(file: OpenFile, offset_bytes: int, landing: memoryview, filled: int) -> None:
    """Go on after `filled` bytes. Raises `LostBlob` where the file ends, and `OSError`."""
    while filled < len(landing):
        position = offset_bytes + filled
        read_bytes = os.preadv(file.descriptor, (landing[filled:],), position)
        if read_bytes == 0:
            raise LostBlob(file, f"it ends at byte {position}")
        filled += read_bytes


def _number_of(name: str) -> int | None:
    try:
        return int(name, 16) if len(name) == 16 else None
    except ValueError:
        return None
