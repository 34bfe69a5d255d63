"""What the tests of extents share: a store that notes its calls, and what writes to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.puts.put_buffers import PutBuffers
from objectcache_storage_server.engines.shared.extents.write_extents import ObjectWriter, StoreRoom
from objectcache_storage_server.engines.shared.versions import ExtentName, ExtentShape
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.engines.stores.shared_store import ObjectRead, SharedStore
from objectcache_storage_server.testing import FaultyStore, PassingStore

WRITERS = itertools.count(0x1234)  # no two have one number
CALL_S_MAX = 20.0


class NotingStore(PassingStore):
    """Notes the addresses that objects were put from, and what was asked for at once."""

    def __init__(self, object_bytes_max: int = 4096) -> None:
        self.faults = FaultyStore(MemoryStore(MemoryStoreState()))
        super().__init__(self.faults)
        self.capabilities = replace(self.capabilities, object_bytes_max=object_bytes_max)
        self.put_parts: dict[str, Sequence[memoryview]] = {}
        self.batches: list[Sequence[ObjectRead]] = []

    def put(self, name: str, parts: Sequence[memoryview], deadline_s: float) -> None:
        self.put_parts[name] = parts
        super().put(name, parts, deadline_s)

    def begin_reads(self, reads: Sequence[ObjectRead], deadline_s: float) -> Future[None]:
        self.batches.append(reads)
        future: Future[None] = super().begin_reads(reads, deadline_s)
        return future

    def names(self) -> set[str]:
        """All objects."""
        return {stored.name for stored in self.list_objects("data/", 1e12)}


class Boundless(StoreRoom):
    """A share of the store without an end."""

    def __init__(self) -> None:
        self.taken_bytes = 0

    def take(self, size_bytes: int) -> None:
        self.taken_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.taken_bytes -= size_bytes

    def check(self, deadline_s: float) -> None:
        """There is always more."""

    def make(self, size_bytes: int, deadline_s: float) -> None:
        """Nothing is stored that could go."""


@contextmanager
def writing_to(
    store: SharedStore, buffer_bytes_max: int = 64 * MIB, call_s_max: float = CALL_S_MAX
) -> Iterator[ObjectWriter]:
    """A writer, and all that it was given done when the block ends."""
    number = next(WRITERS)
    writer = ObjectWriter(
        store, PutBuffers(buffer_bytes_max), lambda: number, call_s_max, Boundless()
    )
    try:
        yield writer
    finally:
        writer.close()


def extent_bytes(store: SharedStore, name: ExtentName, shape: ExtentShape) -> bytes:
    """An extent as its objects hold it; each but the last has its whole length."""
    objects = [store.get(name.object_name(each), 1e12) for each in range(shape.object_count)]
    assert all(len(each) == shape.object_bytes for each in objects[:-1])
    return b"".join(objects)
