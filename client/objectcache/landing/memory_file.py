"""Memory that another process can write to: a sealed memory file, mapped here."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from objectcache.payload import Bytes
from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import MIB

FILE_BYTES_MIN = 64 << 10
_STEPS_PER_DOUBLING = 8  # of file sizes, so that at most an eighth is wasted
# linux/fcntl.h; Python names them, but not on every platform that the types know
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 0x0002
_F_SEAL_GROW = 0x0004


class MemoryFile:
    """`length_bytes` of shared memory. It can neither shrink nor grow.

    The mapping goes when the object and all arrays over it are gone.
    """

    def __init__(self, length_bytes: int) -> None:
        """Allocate and populate. Raises `Unavailable` where the system has no such memory."""
        self.length_bytes = length_bytes
        try:
            self.fd = os.memfd_create("objectcache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as error:
            raise Unavailable(f"no memory files on this system: {error}") from error
        try:
            os.ftruncate(self.fd, length_bytes)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = mmap.mmap(self.fd, length_bytes, flags)
        except (OSError, OverflowError, ValueError) as error:
            os.close(self.fd)
            raise Unavailable(f"no {length_bytes} bytes of shared memory: {error}") from error

    def array(self) -> Bytes:
        """A fresh base array over the whole memory; views of it keep it alive."""
        return np.frombuffer(self._memory, np.uint8)

    def __del__(self) -> None:
        # Without a mapping the constructor has closed the file itself.
        if hasattr(self, "_memory"):
            os.close(self.fd)

    def __repr__(self) -> str:
        return f"<MemoryFile {self.length_bytes / MIB:g} MiB>"


def file_bytes_for(length_bytes: int) -> int:
    """Size of the file for a request of `length_bytes`; there are few, so that files fit again.

    Powers of two up to 2 MiB; above, multiples of 2 MiB and of an eighth of the power of two below.
    """
    if length_bytes <= 2 * MIB:
        return max(FILE_BYTES_MIN, 1 << (length_bytes - 1).bit_length() if length_bytes else 0)
    step = max(2 * MIB, (1 << (length_bytes.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return -(-length_bytes // step) * step
