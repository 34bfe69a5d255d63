"""The memory in which one put gathers what does not come as whole objects of the store."""

from __future__ import annotations

import threading

from objectcache_storage_server.engines.disk.system_errors import translated
from objectcache_storage_server.engines.puts.put_buffers import Bytes, no_put_memory
from objectcache_storage_server.engines.shared.extents.write_extents import PutWrites


class GatherMemory:
    """Buffers of one size. The first `least_count` are had at once, by a put that holds none yet,
    and stay with it, so that it can always go on; more are taken while others leave them.
    """

    def __init__(self, writes: PutWrites, buffer_bytes: int, least_count: int) -> None:
        self._writes = writes
        self._buffers = writes.writer.buffers
        self._buffer_bytes = buffer_bytes
        self._least_count = least_count
        self._count = 0  # that this put has
        self._free: list[Bytes] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<GatherMemory {self._count} of {self._buffer_bytes} bytes, {len(self._free)} free>"

    def take(self) -> Bytes:
        """A buffer; waits for one of its own that is being written. Raises `Busy` where others have
        all memory, which can be only the first time.
        """
        if not self._count:
            self._take_least()
        self._writes.wait_below(self._writes.writer.depth)
        while (buffer := self._take_free()) is None:
            assert self._writes.is_any_under_way(), "more is gathered than was said"
            self._writes.wait_for_one()
        return buffer

    def _take_least(self) -> None:
        wait_s = self._writes.writer.call_s_max
        with translated("take memory for a put", "memory"):
            taken = self._buffers.take_several(self._least_count, self._buffer_bytes, wait_s)
        if not taken:
            raise no_put_memory()
        self._count = len(taken)
        self._free = taken

    def _take_free(self) -> Bytes | None:
        with self._lock:
            if self._free:
                return self._free.pop()
        with translated("take memory for a put", "memory"):
            buffer = self._buffers.take(self._buffer_bytes)
        if buffer is None:
            with self._lock:  # one may have come back meanwhile
                return self._free.pop() if self._free else None
        with self._lock:
            self._count += 1
        return buffer

    def give_back(self, buffer: Bytes) -> None:
        """It is written, or given up. Called in any thread."""
        with self._lock:
            if not self._is_closed and self._count <= self._least_count:
                self._free.append(buffer)
                return
            self._count -= 1
        self._buffers.put(buffer)

    def close(self) -> None:
        """Nothing more is gathered; what is being written comes back later."""
        with self._lock:
            self._is_closed = True
            free, self._free = self._free, []
            self._count -= len(free)
        for buffer in free:
            self._buffers.put(buffer)
