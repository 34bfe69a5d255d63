"""What of an open file is in the page cache, and making it forget a range for certain.

`posix_fadvise(POSIX_FADV_DONTNEED)` is a hint: it leaves pages that are dirty, mapped, or being
read or written. `cachestat` (Linux 6.5) counts the pages of a range, those that are being read
among them. Older kernels have only `mincore`, which does not see a page that is being read. There
the whole range is read first, which waits for such pages, and only then forgotten.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from objectcache_schemas.limits import MIB

DROP_ATTEMPTS = 3  # a page may be in the hands of a reader for a moment
MAPPED_BYTES_MAX = 8 * MIB  # of a range that is read only to be forgotten
_SYS_CACHESTAT = 451  # on every architecture that we know of
_MADV_POPULATE_READ = 22  # Linux 5.14
_NOT_FOUND_WITHOUT_WAITING = (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

Drop = Callable[[int, int, int], bool]  # descriptor, offset, length -> see `BlockDevice.drop`


class Dropper(NamedTuple):
    """A way to make the page cache forget for certain."""

    name: str
    drop: Drop


def find_dropper(file_descriptor: int) -> Dropper:
    """What this kernel has for an open file. Raises `OSError` where it has nothing."""
    try:
        resident_pages(file_descriptor, 0, mmap.PAGESIZE)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP):
            raise
    else:
        return Dropper("cachestat", drop_counted)
    drop_read(file_descriptor, 0, mmap.PAGESIZE)  # raises where it cannot be done
    return Dropper("mincore", drop_read)


def resident_pages(file_descriptor: int, offset_bytes: int, length_bytes: int) -> int:
    """Pages of the range in the page cache, those that are being read included."""
    wanted = (ctypes.c_uint64 * 2)(offset_bytes, length_bytes)
    found = (ctypes.c_uint64 * 5)()
    descriptor, flags = ctypes.c_uint(file_descriptor), ctypes.c_uint(0)
    if _libc.syscall(ctypes.c_long(_SYS_CACHESTAT), descriptor, wanted, found, flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found[0])


def drop_counted(file_descriptor: int, offset_bytes: int, length_bytes: int) -> bool:
    """`BlockDevice.drop`, by counting what is left."""
    for _ in range(DROP_ATTEMPTS):
        os.posix_fadvise(file_descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)
        if resident_pages(file_descriptor, offset_bytes, length_bytes) == 0:
            return True
    return False


def drop_read(file_descriptor: int, offset_bytes: int, length_bytes: int) -> bool:
    """`BlockDevice.drop`, by reading the range, forgetting it, and looking for what is left."""
    end = offset_bytes + length_bytes
    return all(
        _drop_mapped(file_descriptor, begin, min(MAPPED_BYTES_MAX, end - begin))
        for begin in range(offset_bytes, end, MAPPED_BYTES_MAX)
    )


def _drop_mapped(file_descriptor: int, offset_bytes: int, length_bytes: int) -> bool:
    with _mapped(file_descriptor, offset_bytes, length_bytes) as mapped:
        mapped.madvise(_MADV_POPULATE_READ)
    for _ in range(DROP_ATTEMPTS):
        os.posix_fadvise(file_descriptor, offset_bytes, length_bytes, os.POSIX_FADV_DONTNEED)
        with _mapped(file_descriptor, offset_bytes, length_bytes) as mapped:
            if not _any_resident(mapped):
                return True
    return False


def _mapped(file_descriptor: int, offset_bytes: int, length_bytes: int) -> mmap.mmap:
    return mmap.mmap(
        file_descriptor, length_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset_bytes
    )


def _any_resident(mapped: mmap.mmap) -> bool:
    address: int = np.frombuffer(mapped, np.uint8).__array_interface__["data"][0]
    found = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(address, len(mapped), found.ctypes.data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return bool((found & 1).any())


def read_resident(file_descriptor: int, offset_bytes: int, memory: memoryview) -> int:
    """Fill `memory` as far as the page cache has it from its begin on; returns how far."""
    try:
        return os.preadv(file_descriptor, (memory,), offset_bytes, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno not in _NOT_FOUND_WITHOUT_WAITING:
            raise
        return 0
