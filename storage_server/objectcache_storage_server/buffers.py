"""Memory for bytes on their way to a socket, bounded for the whole server.

A delivery is granted its share when it is admitted, so a running delivery never waits for another's
memory; what cannot be granted is refused at once.
"""

from __future__ import annotations

import mmap
import threading

from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import MIB

IDLE_BYTES_MAX = 64 * MIB  # kept warm for the next delivery: fresh pages cost more than a copy


class BufferPool:
    """Hands out buffers of one size, at most `capacity_bytes` of them promised at a time."""

    def __init__(self, buffer_bytes: int, capacity_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.capacity_bytes = capacity_bytes
        self._idle_max = min(IDLE_BYTES_MAX, capacity_bytes) // buffer_bytes
        self._promised_bytes = 0
        self._idle: list[memoryview] = []
        self._lock = threading.Lock()

    @property
    def promised_bytes(self) -> int:
        """Bytes granted to deliveries that run."""
        return self._promised_bytes

    def charged_bytes(self, length_bytes: int) -> int:
        """What memory for `length_bytes` takes: whole buffers, but a small piece only itself."""
        if length_bytes < self.buffer_bytes // 2:
            return length_bytes
        return -(-length_bytes // self.buffer_bytes) * self.buffer_bytes

    def grant(self, wanted_bytes: int) -> int:
        """Promise up to `wanted_bytes`, but at least one buffer (or all of a smaller wish).

        Raises `Busy` when not even that is free. Give it back with `release`.
        """
        least_bytes = min(wanted_bytes, self.buffer_bytes)
        with self._lock:
            free_bytes = self.capacity_bytes - self._promised_bytes
            if free_bytes < least_bytes:
                raise Busy(
                    f"{self._promised_bytes} bytes are in flight, "
                    f"storage.server_in_flight_bytes_max is {self.capacity_bytes}",
                    retry_after_s=1.0,
                )
            granted_bytes = min(wanted_bytes, free_bytes)
            self._promised_bytes += granted_bytes
            return granted_bytes

    def release(self, granted_bytes: int) -> None:
        """Give a grant back."""
        with self._lock:
            self._promised_bytes -= granted_bytes

    def take(self, length_bytes: int) -> memoryview:
        """A buffer under a grant, cut to `length_bytes`, which is at most a buffer's."""
        if length_bytes < self.buffer_bytes // 2:
            return memoryview(bytearray(length_bytes))
        with self._lock:
            buffer = self._idle.pop() if self._idle else None
        if buffer is None:
            buffer = memoryview(mmap.mmap(-1, self.buffer_bytes))
        return buffer[:length_bytes]

    def put(self, view: memoryview) -> None:
        """Return a buffer that nobody reads or writes any more."""
        if not isinstance(view.obj, mmap.mmap) or len(view.obj) != self.buffer_bytes:
            return
        with self._lock:
            if len(self._idle) < self._idle_max:
                self._idle.append(memoryview(view.obj))

    def __repr__(self) -> str:
        return f"<BufferPool {self._promised_bytes} of {self.capacity_bytes} bytes promised>"
