"""Memory files of clients on this host, mapped: written to by the server, paid for by the client.

A page is charged to whoever first touches it. So a file must have no holes when it is registered.
It is sealed against growing, here where its client has not, and has nothing beyond its end: it has
all of its blocks, and a hole that is punched shows in their number. Holes cannot be forbidden: the
seal that does (F_SEAL_FUTURE_WRITE) forbids new mappings too, with which a client that has lost its
session registers its memory again, and a gateway writes to it.

Mapping makes the pages that a file lacks, and then their number shows no hole. So while a file is
mapped its time of change counts as well: punching sets it, as the first write to a page through a
mapping does. What is in the page tables of a client is written to without.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections.abc import Callable

from objectcache_runtime.memory_file_holes import has_holes
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB

PIECE_BYTES = 2 * MIB  # mapped between two looks

# linux/fcntl.h and falloc.h; Python names the first two, but not on every platform it is typed for
_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SHRINK = 0x0002
_F_SEAL_GROW = 0x0004
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_FILE_BYTES_MAX = (1 << 63) - 1  # of any file in memory
_MADV_POPULATE_READ = 22  # Linux 5.14
_CLOCK_REALTIME_COARSE = 5  # from which a file's times are taken
_LOOK_AT_CLOCK_S = 0.001
_LOOKS_AT_CLOCK_MAX = 50  # a tick is 10 ms at most


class MappedTargetMemory:
    """A memory file, mapped writable. `descriptor` is its own, open while it is mapped."""

    transport = "shared_memory"

    def __init__(self, mapping: mmap.mmap, length_bytes: int, descriptor: int) -> None:
        """All of the file is mapped, and has its pages; `length_bytes` of it are registered."""
        self.descriptor = descriptor
        self.length_bytes = length_bytes
        self.view = memoryview(mapping)[:length_bytes]
        self._size_bytes = len(mapping)
        self._was_whole = True

    def is_whole(self) -> bool:
        """Whether it has all of its pages, as far as is known. Costs a microsecond."""
        self._was_whole = self._was_whole and not has_holes(self.descriptor)
        return self._was_whole

    def close(self) -> None:
        """Unmap: the mapping goes with its last reference. What was written into holes goes too."""
        self.view.release()
        if not self.is_whole():
            _free_pages(self.descriptor, 0, self._size_bytes)
        os.close(self.descriptor)


def map_piece(mapping: mmap.mmap, offset_bytes: int, length_bytes: int) -> None:
    """Have a part of a mapping in the page tables, so that its first use costs no fault."""
    try:
        mapping.madvise(_MADV_POPULATE_READ, offset_bytes, length_bytes)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        end_bytes = offset_bytes + length_bytes
        memoryview(mapping)[offset_bytes : end_bytes : mmap.PAGESIZE].tobytes()


def map_memory_file(
    descriptor: int,
    length_bytes: int,
    map_piece: Callable[[mmap.mmap, int, int], None] = map_piece,
) -> MappedTargetMemory:
    """Map a client's file. The caller keeps (and closes) the descriptor.

    Raises `InvalidRequest` for a file that is not regular, is shorter than `length_bytes`, has
    holes, is not sealed against shrinking (a shrunk file would kill the server that writes to it),
    cannot be sealed against growing, or is changed meanwhile.
    """
    with _mapping_locks[os.fstat(descriptor).st_ino % len(_mapping_locks)]:
        status = _checked(descriptor, length_bytes)
        try:
            mapping = mmap.mmap(descriptor, status.st_size, mmap.MAP_SHARED)
            own_descriptor = os.dup(descriptor)
        except OSError as error:
            raise _not_mapped(error) from error
        memory = MappedTargetMemory(mapping, length_bytes, own_descriptor)
        try:
            _map_pieces(memory, mapping, status, map_piece)
        except BaseException:
            memory.close()
            raise
        return memory


# Of a file that two sessions register at once, the one changes what the other looks at.
_mapping_locks = [threading.Lock() for _ in range(64)]


def _map_pieces(
    memory: MappedTargetMemory,
    mapping: mmap.mmap,
    status: os.stat_result,
    map_piece: Callable[[mmap.mmap, int, int], None],
) -> None:
    """Map all of a file as long as it is left alone; a piece is freed where it was not, because it
    may be of pages that this has made.
    """
    for offset_bytes in range(0, len(mapping), PIECE_BYTES):
        piece_bytes = min(PIECE_BYTES, len(mapping) - offset_bytes)
        if not memory.is_whole():
            raise _holes()
        try:
            map_piece(mapping, offset_bytes, piece_bytes)
        except OSError as error:
            raise _not_mapped(error) from error
        if os.fstat(memory.descriptor).st_ctime_ns != status.st_ctime_ns:
            _free_pages(memory.descriptor, offset_bytes, piece_bytes)
            raise _changed()


def _free_pages(descriptor: int, offset_bytes: int, length_bytes: int) -> None:
    """Free what a file has there, so that nobody pays for it. Best effort."""
    fallocate = ctypes.CDLL(None).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
    fallocate(descriptor, mode, offset_bytes, length_bytes)


def _checked(descriptor: int, length_bytes: int) -> os.stat_result:
    """What a file is that has the pages of its size, which is its last, and none beyond; raises
    `InvalidRequest`.
    """
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size < length_bytes:
        raise InvalidRequest(f"the memory file must be a file of at least {length_bytes} bytes")
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError:
        seals = 0
    if not seals & _F_SEAL_SHRINK:
        raise InvalidRequest("the memory file must be sealed with F_SEAL_SHRINK")
    if not seals & _F_SEAL_GROW:
        try:
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_GROW)
        except OSError as error:
            raise InvalidRequest("the memory file must be sealed with F_SEAL_GROW") from error
    end_bytes = -(-os.fstat(descriptor).st_size // mmap.PAGESIZE) * mmap.PAGESIZE
    _free_pages(descriptor, end_bytes, _FILE_BYTES_MAX - end_bytes)
    status = os.fstat(descriptor)
    _pass_time(status.st_ctime_ns)  # what is changed from now on gets another time
    if has_holes(descriptor):
        raise _holes()
    if os.fstat(descriptor).st_ctime_ns != status.st_ctime_ns:
        raise _changed()
    return status


def _pass_time(ctime_ns: int) -> None:
    """Wait until the clock of files shows another time than this: for a tick at most."""
    for _ in range(_LOOKS_AT_CLOCK_MAX):
        if time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) > ctime_ns:
            return
        time.sleep(_LOOK_AT_CLOCK_S)


def _not_mapped(error: OSError) -> InvalidRequest:
    return InvalidRequest(f"the memory file cannot be mapped writable: {error.strerror}")


def _holes() -> InvalidRequest:
    return InvalidRequest(
        "the memory file has holes; allocate it before it is registered (posix_fallocate)"
    )


def _changed() -> InvalidRequest:
    return InvalidRequest(
        "the memory file was changed while it was registered; leave it alone until it is registered"
    )
