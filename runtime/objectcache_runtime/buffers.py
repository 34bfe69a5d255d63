"""Memory for bytes on their way to a socket, bounded for the whole server.

A delivery has its share reserved before it begins, so a running delivery never waits for another's
memory. Those for whom nothing is free wait in `memory_line`.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from objectcache_schemas.limits import MIB

IDLE_BYTES_MAX = 64 * MIB  # kept warm for the next delivery: fresh pages cost more than a copy


class ReservedMemory:
    """Memory that was promised to one transfer; goes back with `release`. Safe for threads."""

    def __init__(
        self,
        pool: BufferPool,
        reserved_bytes: int,
        give_back: Callable[[int], None] | None = None,
        is_wanted: Callable[[], bool] | None = None,
    ) -> None:
        """`give_back` takes what is not used any more, the pool where it is None; `is_wanted` says
        whether somebody waits who comes before it.
        """
        self._reserved_bytes = reserved_bytes
        self._give_back = give_back or pool.release
        self._is_wanted = is_wanted or _by_nobody
        self._lock = threading.Lock()

    @property
    def reserved_bytes(self) -> int:
        """What is held."""
        return self._reserved_bytes

    def shrink(self, length_bytes: int) -> None:
        """Give a part back."""
        with self._lock:
            assert length_bytes <= self._reserved_bytes
            self._reserved_bytes -= length_bytes
        self._give_back(length_bytes)

    def shrink_if_wanted(self, length_bytes: int, least_bytes: int) -> bool:
        """Give a part back where `least_bytes` are left and somebody waits for it; returns
        whether it did.
        """
        if self._reserved_bytes - length_bytes < least_bytes or not self._is_wanted():
            return False
        self.shrink(length_bytes)
        return True

    def release(self) -> None:
        """Give all of it back. A second call has no effect."""
        with self._lock:
            length_bytes, self._reserved_bytes = self._reserved_bytes, 0
        if length_bytes:
            self._give_back(length_bytes)

    def __repr__(self) -> str:
        return f"<ReservedMemory of {self._reserved_bytes} bytes>"


class BufferPool:
    """Hands out buffers of one size, at most `capacity_bytes` of them promised at a time."""

    def __init__(self, buffer_bytes: int, capacity_bytes: int, capacity_name: str = "") -> None:
        """`capacity_bytes` is taken as one buffer's where it is less: nothing could be sent.
        `capacity_name` is what those who are refused are told that it is.
        """
        self.buffer_bytes = buffer_bytes
        self.capacity_bytes = capacity_bytes = max(buffer_bytes, capacity_bytes)
        self.capacity_name = capacity_name or "the memory for them"
        self.on_release: Callable[[], None] = _nobody  # called without a lock, in any thread
        self._idle_max = min(IDLE_BYTES_MAX, capacity_bytes) // buffer_bytes
        self._promised_bytes = 0
        self._idle: list[memoryview] = []
        self._lock = threading.Lock()

    @property
    def promised_bytes(self) -> int:
        """Bytes reserved for deliveries that run."""
        return self._promised_bytes

    def charged_bytes(self, length_bytes: int) -> int:
        """What memory for `length_bytes` takes: whole buffers, but a small piece only itself."""
        if length_bytes < self.buffer_bytes // 2:
            return length_bytes
        return -(-length_bytes // self.buffer_bytes) * self.buffer_bytes

    @property
    def shortage(self) -> str:
        """How much is taken of what limit, for whoever is refused."""
        return (
            f"{self._promised_bytes} bytes are in flight, "
            f"{self.capacity_name} is {self.capacity_bytes}"
        )

    def reserve(self, wanted_bytes: int, least_bytes: int = 1) -> int:
        """Promise `wanted_bytes`, or as many times `least_bytes` as are free; 0 where none is.

        Give it back with `release`.
        """
        with self._lock:
            reserved_bytes = wanted_bytes
            free_bytes = self.capacity_bytes - self._promised_bytes
            if free_bytes < wanted_bytes:
                reserved_bytes = free_bytes // least_bytes * least_bytes
            self._promised_bytes += reserved_bytes
            return reserved_bytes

    def release(self, reserved_bytes: int) -> None:
        """Give back what was reserved, or a part of it."""
        with self._lock:
            self._promised_bytes -= reserved_bytes
        self.on_release()

    def take(self, length_bytes: int) -> memoryview:
        """A buffer of what was reserved, cut to `length_bytes`, which is at most a buffer's."""
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


def _nobody() -> None:
    """Nobody waits for memory."""


def _by_nobody() -> bool:
    """Nobody waits for what is reserved."""
    return False
