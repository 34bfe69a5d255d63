"""Space held back in a shared folder, so that records and deletes go on when it is full."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.stores.folder.mounted_folder import FILE_MODE

T = TypeVar("T")

RESERVE = "reserve"
RESERVE_BYTES = 16 * MIB
STEP_BYTES = 64 * KIB  # given up at a time: what a record leaves of it waits for the next
GROW_BYTES_MAX = MIB  # taken at a time, and less where there is not as much
IS_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FolderReserve:
    """The file that holds the space; every host's, and any of them may give some of it up. Who puts
    sees that it is whole, or puts nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def use(self, folder: int, action: Callable[[], T]) -> T:
        """`action`, again after a little was given up for it while it finds no space. It raises
        `OSError` and may be repeated then.
        """
        while True:
            try:
                return action()
            except OSError as error:
                if error.errno not in IS_FULL or not self._give(folder, STEP_BYTES):
                    raise

    def use_once(self, folder: int, action: Callable[[], T], size_bytes: int) -> T:
        """`action`, and where it finds no space once more, after `size_bytes` and a little for its
        name were given up for it: where that is not enough others fill the folder, and would have
        all that is held. It raises `OSError` and may be repeated then.
        """
        try:
            return action()
        except OSError as error:
            if error.errno not in IS_FULL or not self._give(folder, size_bytes + STEP_BYTES):
                raise
        return action()

    def take(self, folder: int) -> None:
        """Hold the space, or as much as there is room for; raises `OSError` for other reasons."""
        with contextlib.suppress(_Full):
            self._take(folder)

    def have_whole(self, folder: int) -> None:
        """Hold all the space before anything else does. Raises `OSError` where there is no room."""
        try:
            self._take(folder)
        except _Full as full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from full

    def is_short(self, folder: int) -> bool:
        """Whether there is no room for all of it. Raises `OSError`."""
        try:
            self._take(folder)
        except _Full:
            return True
        return False

    def _take(self, folder: int) -> None:
        """Raises `OSError`, and `_Full` where there is no room for all of it."""
        with contextlib.suppress(FileNotFoundError):
            if os.stat(RESERVE, dir_fd=folder).st_size >= RESERVE_BYTES:
                return
        with self._lock:
            descriptor = os.open(
                RESERVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE, dir_fd=folder
            )
            try:
                _grow(descriptor)
            finally:
                os.close(descriptor)

    def _give(self, folder: int, step_bytes: int) -> bool:
        """Give some space back to the file system; false where there is none left."""
        with self._lock:
            try:
                held_bytes = os.stat(RESERVE, dir_fd=folder).st_size
                if not held_bytes:
                    return False
                descriptor = os.open(RESERVE, os.O_RDWR | os.O_CLOEXEC, dir_fd=folder)
                try:
                    os.ftruncate(descriptor, max(held_bytes - step_bytes, 0))
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except FileNotFoundError:
                return False
        return True


class _Full(Exception):
    """There is no room for the whole reserve."""


def _grow(descriptor: int) -> None:
    """Make it whole, or as long as there is room for. Raises `OSError`, `_Full`."""
    step_bytes = GROW_BYTES_MAX
    while (held_bytes := os.fstat(descriptor).st_size) < RESERVE_BYTES:
        try:
            os.posix_fallocate(descriptor, held_bytes, min(step_bytes, RESERVE_BYTES - held_bytes))
        except OSError as error:
            if os.fstat(descriptor).st_size > held_bytes:  # what came of it may be a hole
                os.ftruncate(descriptor, held_bytes)
            if error.errno not in IS_FULL:
                raise
            if step_bytes <= STEP_BYTES:
                raise _Full from error
            step_bytes //= 2
