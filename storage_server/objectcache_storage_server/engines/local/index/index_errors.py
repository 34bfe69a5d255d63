"""LMDB's errors as ours, translated where the index meets LMDB. Clients are not told the path."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Generator
from pathlib import Path

import lmdb

from objectcache_schemas.errors import ObjectCacheError, StorageFull, Unavailable
from objectcache_schemas.limits import MIB

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DAMAGED = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)
_NO_ROOM_BYTES = 1 * MIB  # free on a file system that has no room for a commit's pages

log = logging.getLogger("objectcache.storage_server.engines.local.index")


def damaged_index(what: str) -> Unavailable:
    """For damage that no single object explains."""
    return Unavailable(
        f"{what}; the index is damaged: stop the server and remove the directories index and data "
        f"in its data directory (server.data_dir) to start with no objects; accounts stay"
    )


def full_index(operation: str) -> StorageFull:
    """For an index that may not grow."""
    return StorageFull(
        f"{operation} the index: it has reached storage.index_bytes_max; "
        f"delete objects or raise the setting"
    )


def no_room_for_index(operation: str) -> StorageFull:
    """For a file system that has no room for the index."""
    reason = os.strerror(errno.ENOSPC)
    return StorageFull(f"{operation} the index: {reason}; delete objects or add space")


@contextlib.contextmanager
def translated_index(operation: str, folder: Path) -> Generator[None, None, None]:
    """Raise what an error of LMDB in the body means."""
    try:
        yield
    except lmdb.Error as error:
        log.warning("%s %s: %s", operation, folder, error)
        raise _as_our_error(error, operation, folder) from error


def _as_our_error(error: lmdb.Error, operation: str, folder: Path) -> ObjectCacheError:
    if isinstance(error, lmdb.MapFullError):
        return full_index(operation)
    if is_no_room(error, folder):
        return no_room_for_index(operation)
    what = f"{operation} the index: {_reason(error, error.code)}"
    if isinstance(error, _DAMAGED):
        return damaged_index(what)
    return Unavailable(what)


def is_no_room(error: lmdb.Error, folder: Path) -> bool:
    """Whether it says that there is no room, on the device or in the index."""
    if isinstance(error, lmdb.MapFullError):
        return True
    # LMDB calls a write that ended early an I/O error.
    return error.code in _FULL or (error.code == errno.EIO and is_full(folder))


def _reason(error: Exception, code: int) -> str:
    """Why, without a path, which `str(error)` may hold; LMDB's own codes are negative."""
    return os.strerror(code) if code > 0 else type(error).__name__


def is_full(folder: Path) -> bool:
    """Whether the file system has no room for a commit."""
    with contextlib.suppress(OSError):
        state = os.statvfs(folder)
        return state.f_bavail * state.f_frsize < _NO_ROOM_BYTES
    return False
