"""The file of a cache: slots, and beside it what lies in them while no server has it open.

What lies in the slots is told by an index in memory, which is written when the file is closed and
removed, durably, before anything is written to the file again. So an index that is found belongs to
the file as it is: whatever ended a server otherwise, its cache is empty afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import msgspec

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.disk.data_folders import sync_folder
from objectcache_storage_server.engines.lmdb_spaces.seals import seal, unseal
from objectcache_storage_server.engines.shared.cache.cache_index import CachedObject, CacheIndex

FILE_NAME = "cached-objects"
INDEX_NAME = "cached-index"
SEAL_OWNER = 1  # the format's version


class _SavedIndex(msgspec.Struct, array_like=True):
    """An index, and the file that it belongs to: any other, or one that was changed since, is
    another.
    """

    file: tuple[int, int]  # inode, and when it was changed
    slot_bytes: int
    unread: list[tuple[str, CachedObject]]
    read: list[tuple[str, CachedObject]]


class CacheFile:
    """One server's. Every method may raise `OSError`."""

    def __init__(self, folder: Path, slot_count: int, slot_bytes: int) -> None:
        """Has room for all slots. Raises `Unavailable` where another server has it open."""
        self._folder = folder
        self._slot_bytes = slot_bytes
        self.index = CacheIndex(slot_count)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as opened:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(folder / FILE_NAME, flags, 0o600)
            opened.callback(os.close, self._descriptor)
            self._lock()
            self._take_index()
            self._take_room(slot_count * slot_bytes)
            self._opened = opened.pop_all()

    def read(self, slot: int, begin: int, landing: memoryview) -> None:
        """Fill `landing` from a byte of a slot on."""
        position = slot * self._slot_bytes + begin
        while landing:
            count = os.preadv(self._descriptor, [landing], position)
            if not count:
                raise OSError(errno.EIO, "the file is shorter than it was made")
            landing, position = landing[count:], position + count

    def write(self, slot: int, begin: int, data: memoryview) -> None:
        """Have these bytes in a slot."""
        position = slot * self._slot_bytes + begin
        while data:
            count = os.pwritev(self._descriptor, [data], position)
            data, position = data[count:], position + count

    def close(self, *, keep: bool) -> None:
        """With `keep` what the index says is found by the next one. The file is closed whatever
        happens.
        """
        with self._opened:
            if keep:
                os.fsync(self._descriptor)
                self._save_index()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(
                f"another storage server has its cache in {self._folder}: set another "
                "storage.cache_dir"
            ) from error

    def _take_room(self, size_bytes: int) -> None:
        try:
            if os.fstat(self._descriptor).st_size > size_bytes:
                os.ftruncate(self._descriptor, size_bytes)
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        except OSError:
            os.ftruncate(self._descriptor, 0)  # what it got is others' again
            raise

    def _mark(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_ino, found.st_mtime_ns

    def _save_index(self) -> None:
        saved = _SavedIndex(
            self._mark(),
            self._slot_bytes,
            list(self.index.unread.items()),
            list(self.index.read.items()),
        )
        path = self._folder / f"{INDEX_NAME}.new"
        with open(path, "wb", opener=_for_this_user) as file:
            file.write(seal(msgspec.msgpack.encode(saved), SEAL_OWNER))
            file.flush()
            os.fsync(file.fileno())
        path.rename(self._folder / INDEX_NAME)
        sync_folder(self._folder)

    def _take_index(self) -> None:
        """What was saved counts once."""
        path = self._folder / INDEX_NAME
        try:
            body = unseal(path.read_bytes(), SEAL_OWNER)
        except FileNotFoundError:
            return
        path.unlink()
        sync_folder(self._folder)
        if body is None:
            return
        saved = msgspec.msgpack.decode(body, type=_SavedIndex)
        if (saved.file, saved.slot_bytes) == (self._mark(), self._slot_bytes):
            self.index.restore(saved.unread, saved.read)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
