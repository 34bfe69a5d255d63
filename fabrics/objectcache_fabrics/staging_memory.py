"""Memory that bytes leave from over fabrics: registered once, lent in buffers."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

from objectcache_runtime.buffers import BufferPool


class StagingMemory(BufferPool):
    """Buffers that lie in one run of memory, which fabrics register once.

    Every piece takes a whole buffer. The one that came back last is handed out first: its bytes may
    still be in a processor's cache.
    """

    def __init__(self, buffer_bytes: int, capacity_bytes: int, capacity_name: str = "") -> None:
        count = max(1, capacity_bytes // buffer_bytes)
        super().__init__(buffer_bytes, count * buffer_bytes, capacity_name)
        self.memory = _large_pages(count * buffer_bytes)
        self._view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._free = list(range(count))
        self._withdrawn: set[int] = set()  # buffers that have not come back yet
        self._shrink_bytes = 0  # of buffers that have, and are still reserved

    @property
    def length_bytes(self) -> int:
        """Bytes of the whole, with what was withdrawn."""
        return len(self.memory)

    @property
    def shortage(self) -> str:
        return (
            f"{self.promised_bytes} bytes are being staged, {self.capacity_name} is "
            f"{self.length_bytes}"
        ) + (
            f", and {self.length_bytes - self.capacity_bytes} are out of use until the server is "
            "restarted: a device did not let go of them"
            if self.capacity_bytes < self.length_bytes
            else ""
        )

    def charged_bytes(self, length_bytes: int) -> int:
        return -(-length_bytes // self.buffer_bytes) * self.buffer_bytes

    def take(self, length_bytes: int) -> memoryview:
        with self._lock:
            begin = self._free.pop() * self.buffer_bytes
        return self._view[begin : begin + length_bytes]

    def put(self, view: memoryview) -> None:
        number = self.offset_of(view) // self.buffer_bytes
        with self._lock:
            if number in self._withdrawn:
                self._withdrawn.remove(number)
                self._shrink_bytes += self.buffer_bytes
            else:
                self._free.append(number)

    def withdraw(self, view: memoryview) -> None:
        """Keep a buffer that was taken out of use for good, because a device may still touch it.

        Whoever took it returns it with `put` as ever, takes no other in its place, and gives the
        memory back; that makes `capacity_bytes` smaller by it. Repeating has no effect.
        """
        with self._lock:
            self._withdrawn.add(self.offset_of(view) // self.buffer_bytes)

    def release(self, reserved_bytes: int) -> None:
        with self._lock:
            shrunk_bytes = min(self._shrink_bytes, reserved_bytes)
            self._shrink_bytes -= shrunk_bytes
            self.capacity_bytes -= shrunk_bytes
        super().release(reserved_bytes)

    def offset_of(self, view: memoryview) -> int:
        """Where a piece of a buffer lies in the whole."""
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) - self.address


def _large_pages(length_bytes: int) -> mmap.mmap:
    """Memory in pages as large as the system has, which copies walk through faster."""
    memory = mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
