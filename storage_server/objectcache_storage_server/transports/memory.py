"""Into a buffer of this process: the model that other transports are tested against."""

from __future__ import annotations

import threading

from objectcache_schemas.errors import ObjectCacheError
from objectcache_storage_server.transports.base import Transport


class MemoryTransport(Transport):
    """Collects a delivery in `buffer`, and what it was told in plain attributes."""

    name = "memory"

    def __init__(self, length_bytes: int) -> None:
        self.buffer = bytearray(length_bytes)
        self.written_bytes = 0
        self.announced: list[int] = []
        self.failure: tuple[int, ObjectCacheError] | None = None
        self.closed = False
        self._lock = threading.Lock()

    def reserve(self, offset_bytes: int, length_bytes: int) -> bool:
        return True

    def memory(self, offset_bytes: int, length_bytes: int) -> memoryview:
        return memoryview(self.buffer)[offset_bytes : offset_bytes + length_bytes]

    def written(self, offset_bytes: int, length_bytes: int) -> None:
        with self._lock:
            self.written_bytes += length_bytes

    def announce(self, end_layer: int) -> None:
        self.announced.append(end_layer)

    def fail(self, failed_layer: int, error: ObjectCacheError) -> None:
        self.failure = (failed_layer, error)

    def close(self) -> None:
        self.closed = True
