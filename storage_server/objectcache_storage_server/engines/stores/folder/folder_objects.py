"""Objects in a shared folder: one file each, in 256 folders by a hash of the name.

A file is written under its name with a ~ behind, flushed, and renamed: what has the name itself is
whole. What a crash leaves half-written is listed under the object's name, and deleted by it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.stores.folder.mounted_folder import (
    FOLDERS,
    READ_FILE,
    READ_FOLDER,
    MountedFolder,
    read_file,
    sync_names,
    unlink_if_there,
    write_new_file,
)
from objectcache_storage_server.engines.stores.landing_batch import LandingBatch, joined_ranges
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    StoredObject,
)
from objectcache_storage_server.engines.stores.store_calls import check_name

_BEGUN = "~"  # behind the name of what is being written; in no object's name
_SLASH = "="  # in the name of a file for the / in an object's
READ_BYTES_MAX = 4 * MIB  # by one call of the system

_memory = threading.local()


class PutClaim:
    """Who decides whether an object appears: the thread that writes it, when it has all bytes, or
    its caller, who takes the bytes back at the deadline.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False

    def take(self) -> bool:
        """True for whoever is first."""
        with self._lock:
            was_taken, self._is_taken = self._is_taken, True
            return not was_taken


def put_object(
    folder: int,
    name: str,
    parts: Sequence[memoryview],
    claim: PutClaim,
    check: Callable[[], None],
    with_space: Callable[[Callable[[], object]], object] = lambda action: action(),
) -> None:
    """Store an object, unless `claim` is taken by the time it is written, or `check` raises
    `OSError` then. Raises `OSError`. `with_space` calls what takes space, and again where it can
    make some.
    """
    path = _path(name)
    begun = path + _BEGUN
    unlink_if_there(begun, folder)  # of an earlier try, whose thread may still be writing it
    with_space(lambda: write_new_file(begun, folder, [part.cast("B") for part in parts]))
    try:
        check()
    except OSError:
        unlink_if_there(begun, folder)
        raise
    if not claim.take():
        unlink_if_there(begun, folder)
        return
    with_space(lambda: os.rename(begun, path, src_dir_fd=folder, dst_dir_fd=folder))
    sync_names(os.path.dirname(path), folder)


def get_object(folder: int, name: str, mounted: MountedFolder) -> bytes:
    """A whole object; raises `OSError`, `LostObject`, `Unavailable`."""
    try:
        return read_file(_path(name), folder)
    except FileNotFoundError as error:
        raise _lost(folder, name, mounted) from error


def read_object(
    folder: int, reads: Sequence[ObjectRead], batch: LandingBatch, mounted: MountedFolder
) -> None:
    """Land ranges of one object, in order of their offsets. Raises `OSError`, `LostObject`,
    `Unavailable`.
    """
    name = reads[0].name
    try:
        descriptor = os.open(_path(name), READ_FILE, dir_fd=folder)
    except FileNotFoundError as error:
        raise _lost(folder, name, mounted) from error
    try:
        for joined in joined_ranges(reads, READ_BYTES_MAX):
            begin_bytes = joined[0].offset_bytes
            end_bytes = max(read.offset_bytes + read.landing.nbytes for read in joined)
            data = _own_memory(end_bytes - begin_bytes)
            filled = 0
            while filled < len(data):
                read_bytes = os.preadv(descriptor, [data[filled:]], begin_bytes + filled)
                if read_bytes == 0:
                    raise LostObject(name, f"it ends at byte {begin_bytes + filled}")
                filled += read_bytes
            if not batch.land(joined, data, begin_bytes):
                return
    finally:
        os.close(descriptor)


def list_folder(folder: int, path: str, prefix: str) -> list[StoredObject]:
    """Objects of one of the folders; raises `OSError`."""
    start = prefix.replace("/", _SLASH)
    found: dict[str, int] = {}
    opened = os.open(path, READ_FOLDER, dir_fd=folder)
    try:
        with os.scandir(opened) as entries:
            for entry in entries:
                if entry.name.startswith(start):
                    name = entry.name.removesuffix(_BEGUN).replace(_SLASH, "/")
                    if name.startswith(prefix):
                        with contextlib.suppress(FileNotFoundError):
                            found[name] = entry.stat(follow_symlinks=False).st_size
    finally:
        os.close(opened)
    return [StoredObject(name, size_bytes) for name, size_bytes in found.items()]


def delete_objects(folder: int, names: Iterable[str], mounted: MountedFolder) -> None:
    """Remove objects and what was begun of them; raises `OSError`, `Unavailable`."""
    for name in names:
        path = _path(name)
        if not unlink_if_there(path, folder) and not unlink_if_there(path + _BEGUN, folder):
            mounted.check_there(folder)


def _path(name: str) -> str:
    spread = zlib.crc32(name.encode()) % len(FOLDERS)
    return f"{FOLDERS[spread]}/{check_name(name).replace('/', _SLASH)}"


def _lost(folder: int, name: str, mounted: MountedFolder) -> LostObject:
    """What is not there, where the folder itself is. Raises `Unavailable`."""
    mounted.check_there(folder)
    return LostObject(name, "it is not there")


def _own_memory(size_bytes: int) -> memoryview:
    """Memory of this thread's, the same for each read."""
    memory: bytearray | None = getattr(_memory, "buffer", None)
    if memory is None or len(memory) < size_bytes:
        memory = _memory.buffer = bytearray(max(size_bytes, READ_BYTES_MAX))
    return memoryview(memory)[:size_bytes]
