"""Objects in this process's memory: the oracle of the contract, and the quick start's engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from objectcache_schemas.operators.engine_status import EngineStatus
from objectcache_storage_server.engines.blobs.blob_engine import BlobEngine
from objectcache_storage_server.engines.catalog_engine import DamageCount
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.memory.memory_blobs import MemoryBlobStore
from objectcache_storage_server.engines.memory.memory_catalog import MemoryCatalog

OPEN_OBJECTS_MAX = 1_000_000  # an open one costs nothing but its entry


class MemoryEngine(BlobEngine):
    """Nothing of it outlives the process."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._memory = MemoryCatalog()
        super().__init__(
            "memory",
            self._memory,
            MemoryBlobStore(),
            OPEN_OBJECTS_MAX,
            FlushLatch(),
            DamageCount(),
            clock,
        )

    def __repr__(self) -> str:
        return f"<MemoryEngine {self._memory!r}>"

    def status(self) -> EngineStatus:
        return msgspec.structs.replace(super().status(), objects=self._memory.object_count)
