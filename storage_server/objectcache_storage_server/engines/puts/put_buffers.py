"""Memory that puts gather bytes in before they are written, bounded for all puts together."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np
import numpy.typing as npt

from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.disk.system_errors import RETRY_AFTER_S

WAITING_MAX = 4  # calls at once: whoever waits holds a thread that those with memory need
WAIT_S_MAX = 5.0
IDLE_BUFFER_BYTES_MAX = 128 * MIB  # kept for the next put: fresh pages cost as much as a copy

Bytes = npt.NDArray[np.uint8]


class PutBuffers:
    """Page-aligned buffers, and leave to have memory of one's own. Safe to use from any thread."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._bytes = 0  # in use
        self.waiting_count = 0  # calls
        self._idle: list[Bytes] = []
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<PutBuffers {self._bytes}/{self.bytes_max} bytes in use>"

    def reserve(self, length_bytes: int, wait_s: float = 0.0) -> bool:
        """Whether so much may be had, from now until `release`. Waits for it, for WAIT_S_MAX at
        most, unless WAITING_MAX do already.
        """
        end_s = time.monotonic() + min(wait_s, WAIT_S_MAX)
        with self._changed:
            if self.waiting_count >= WAITING_MAX or length_bytes > self.bytes_max:
                end_s = 0.0
            self.waiting_count += 1
            try:
                while self._bytes + length_bytes > self.bytes_max:
                    left_s = end_s - time.monotonic()
                    if left_s <= 0:
                        return False
                    self._changed.wait(left_s)
            finally:
                self.waiting_count -= 1
            self._bytes += length_bytes
            return True

    def release(self, length_bytes: int) -> None:
        """Give leave back."""
        with self._changed:
            self._bytes -= length_bytes
            self._changed.notify_all()

    def take(self, length_bytes: int) -> Bytes | None:
        """Memory of this length, not zeroed; None where that would be too much. Raises `OSError`
        where the system has none.
        """
        taken = self.take_several(1, length_bytes)
        return taken[0] if taken else None

    def take_several(self, count: int, length_bytes: int, wait_s: float = 0.0) -> list[Bytes]:
        """As many at once, or none where `reserve` says no."""
        if not self.reserve(count * length_bytes, wait_s):
            return []
        try:
            return [self._idle_buffer(length_bytes) for _ in range(count)]
        except BaseException:
            self.release(count * length_bytes)
            raise

    def _idle_buffer(self, length_bytes: int) -> Bytes:
        with self._changed:
            for index, buffer in enumerate(self._idle):
                if len(buffer) == length_bytes:
                    return self._idle.pop(index)
        return np.frombuffer(mmap.mmap(-1, length_bytes), np.uint8)

    def put(self, buffer: Bytes) -> None:
        """Give it back."""
        with self._changed:
            self._bytes -= len(buffer)
            self._idle.insert(0, buffer)
            while sum(map(len, self._idle)) > min(IDLE_BUFFER_BYTES_MAX, self.bytes_max):
                self._idle.pop()
            self._changed.notify_all()


def no_put_memory() -> Busy:
    """For a put that had no memory in time."""
    return Busy(
        "puts hold all memory that storage.put_buffer_bytes_max allows", retry_after_s=RETRY_AFTER_S
    )
