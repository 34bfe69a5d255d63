"""The folder of a store, as one host has it mounted.

Everything is done relative to a descriptor of the folder, which is opened once: where the mount is
gone, the system says so, and never shows the empty folder below the mount point. A marker with the
store's id tells the folder itself from an empty one, whenever something is not there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TypeVar

from objectcache_schemas.errors import (
    InvalidRequest,
    ObjectCacheError,
    StorageFull,
    Unavailable,
)
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.disk.system_errors import as_our_error

T = TypeVar("T")

MARKER = "store"
FOLDERS = [f"objects/{number:02x}" for number in range(256)]
LOG = "log"
FLOORS = "log/floors"
COMES_FREE = "what is deleted comes free after storage.grace_s"
FILE_MODE, FOLDER_MODE = 0o600, 0o700
NEW_FILE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
READ_FILE = os.O_RDONLY | os.O_CLOEXEC
READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MARKER = re.compile(rb"objectcache shared folder 1\nstore ([0-9a-f]{32})\n")
_MOUNT_IS_GONE = frozenset(
    {errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ESHUTDOWN, errno.EIO, errno.ENOENT}
)
_IS_UNKNOWN = frozenset({errno.ETIMEDOUT, errno.EINTR, errno.ECONNRESET})

log = logging.getLogger("objectcache.storage_server.engines.stores.folder")


class _OpenFolder:
    """A descriptor, closed when it is retired and nobody uses it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.user_count = 0
        self.is_retired = False


class MountedFolder:
    """Opens the store at `root`; makes one there with `create`, where there is none.

    Raises `Unavailable` where there is no store, or no folder to make its folder in;
    `InvalidRequest` where none can be made of a file.
    """

    def __init__(self, root: Path, create: bool) -> None:
        self._root = root
        self._lock = threading.Lock()
        made_id = ""
        if create:
            with self._translated("make a shared folder"):
                made_id = _make(root)
        self.store_id = ""
        self._open = self._opened()
        try:
            self.store_id = self._marked_id(self._open.descriptor)
        except BaseException:
            self.close()
            raise
        self.was_made = self.store_id == made_id

    def __repr__(self) -> str:
        return f"<MountedFolder {self._root} store {self.store_id[:8]}>"

    def run(self, operation: str, action: Callable[[int], T]) -> T:
        """What `action` makes of the folder's descriptor, its system's errors as ours. `action`
        handles what may be missing while the store is there.
        """
        with self._lock:
            opened = self._open
            opened.user_count += 1
        try:
            return action(opened.descriptor)
        except OSError as error:
            if error.errno in _MOUNT_IS_GONE:
                self._reopen(opened)
            raise self._as_ours(error, operation) from error
        except Unavailable as error:
            if not isinstance(error, StoreTimeout):
                self._reopen(opened)
            raise
        finally:
            self._leave(opened)

    def check_there(self, descriptor: int) -> None:
        """Raise `Unavailable` unless this is the store's folder still: then what was not found in
        it is not there.
        """
        if self._marked_id(descriptor) != self.store_id:
            raise Unavailable("the shared folder is that of another store by now")

    def close(self) -> None:
        """Let go of the folder."""
        self._retire(self._open)

    # --- the descriptor ---

    def _opened(self) -> _OpenFolder:
        with self._translated("open the shared folder"):
            return _OpenFolder(os.open(self._root, READ_FOLDER))

    def _reopen(self, gone: _OpenFolder) -> None:
        """Take what is mounted now, if it is the store: the next call uses it."""
        with contextlib.suppress(ObjectCacheError):
            fresh = self._opened()
            try:
                self.check_there(fresh.descriptor)
            except Unavailable:
                os.close(fresh.descriptor)
                return
            with self._lock:
                is_first = self._open is gone
                if is_first:
                    self._open = fresh
            self._retire(gone if is_first else fresh)

    def _retire(self, opened: _OpenFolder) -> None:
        with self._lock:
            is_closed, opened.is_retired = opened.is_retired, True
            if is_closed or opened.user_count:
                return
        os.close(opened.descriptor)

    def _leave(self, opened: _OpenFolder) -> None:
        with self._lock:
            opened.user_count -= 1
            if opened.user_count or not opened.is_retired:
                return
        os.close(opened.descriptor)

    def _marked_id(self, descriptor: int) -> str:
        try:
            found = _MARKER.fullmatch(read_file(MARKER, descriptor))
        except OSError as error:
            raise Unavailable(
                f"the shared folder has no store in it ({os.strerror(error.errno or 0)}): mount "
                "the file system, or have a store made in it"
            ) from error
        if found is None:
            raise Unavailable(f"the file {MARKER} in the shared folder is none of this version's")
        return found[1].decode()

    # --- errors ---

    @contextlib.contextmanager
    def _translated(self, operation: str) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            raise self._as_ours(error, operation) from error

    def _as_ours(self, error: OSError, operation: str) -> Unavailable | StorageFull:
        translated = as_our_error(error, operation, self._root)
        if error.errno in _IS_UNKNOWN:
            return StoreTimeout(translated.message)
        if isinstance(translated, StorageFull):
            return StorageFull(f"{translated.message}; {COMES_FREE}")
        if isinstance(translated, Unavailable):
            return translated
        return Unavailable(translated.message)


def read_file(path: str, folder: int) -> bytes:
    """All bytes of a file; raises `OSError`."""
    descriptor = os.open(path, READ_FILE, dir_fd=folder)
    try:
        size_bytes = os.fstat(descriptor).st_size
        data = os.pread(descriptor, size_bytes + 1, 0)
        while len(data) < size_bytes:
            more = os.pread(descriptor, size_bytes + 1 - len(data), len(data))
            if not more:
                break
            data += more
        return data
    finally:
        os.close(descriptor)


def write_new_file(path: str, folder: int, parts: list[memoryview]) -> os.stat_result:
    """A file that was not there, flushed; raises `OSError`, and then there is none."""
    descriptor = os.open(path, NEW_FILE, FILE_MODE, dir_fd=folder)
    try:
        for part in parts:
            while part:
                part = part[os.write(descriptor, part) :]
        os.fsync(descriptor)
        return os.fstat(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)


def sync_names(path: str, folder: int) -> None:
    """Make the names in a folder durable; raises `OSError`."""
    descriptor = os.open(path, READ_FOLDER, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unlink_if_there(path: str, folder: int) -> bool:
    """Whether there was such a file, which is gone; raises `OSError`."""
    try:
        os.unlink(path, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _make(root: Path) -> str:
    """The folders, then the marker: one of those that make a store at once has it. Returns the id
    that the store has if it was this one, "" where there was a store.
    """
    if (root / MARKER).exists():
        return ""
    if os.path.lexists(root) and not root.is_dir():  # in this order: another may make it between
        raise InvalidRequest(f"{root} is no folder: name one, or a path where one can be made")
    if not root.parent.is_dir():
        raise Unavailable(
            f"there is no folder {root.parent} to make the store's in: mount its file system, or "
            f"make that folder first"
        )
    os.makedirs(root, mode=FOLDER_MODE, exist_ok=True)
    for path in ("objects", LOG, FLOORS, *FOLDERS):  # each: the mode is that of the last one only
        os.makedirs(root / path, mode=FOLDER_MODE, exist_ok=True)
    folder = os.open(root, READ_FOLDER)
    fresh, store_id = f"{MARKER}~{uuid.uuid4().hex}", uuid.uuid4().hex
    try:
        marker = f"objectcache shared folder 1\nstore {store_id}\n".encode()
        for name in ("objects", FLOORS, LOG, "."):
            sync_names(name, folder)
        write_new_file(fresh, folder, [memoryview(marker)])
        with contextlib.suppress(FileExistsError):
            os.link(fresh, MARKER, src_dir_fd=folder, dst_dir_fd=folder)
        os.unlink(fresh, dir_fd=folder)
        sync_names(".", folder)
    finally:
        os.close(folder)
    return store_id
