"""The engine and its readers in this process, without gateway, sockets and client."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.basis.prefix import Geometry, check_layer
from benchmarks.machine.page_cache_copy import FileRun
from objectcache_runtime.settings import ServerSettings, Settings, StorageSettings
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.records import BucketInfo, BucketPolicy, Condition, Verification
from objectcache_storage_server.deliveries.delivery import ServedDelivery
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.deliveries.plan import plan_chunks, target_fragment_bytes
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.space.extent_geometry import (
    Geometry as ExtentGeometry,
)
from objectcache_storage_server.engines.open_engine import open_local_engine
from objectcache_storage_server.puts.target_source import piece_bytes
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.service import Service
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.transports.base import Transport

BUCKET = "bench"


class Store:
    """An engine on data files in `folder`, and as many reader threads as the server has.

    One delivery at a time.
    """

    def __init__(self, folder: Path, engine: LocalEngine, service: Service) -> None:
        self.folder = folder
        self.engine = engine
        self.service = service
        self._dispatcher: Dispatcher = service.schedule.dispatcher
        self.reader_threads = service.schedule.reader_threads
        if BUCKET not in {bucket.name for bucket in engine.buckets()}:
            engine.create_bucket(
                BucketInfo(name=BUCKET, owner="root", region="bench", created_s=0.0)
            )

    def verify(self, verification: Verification) -> None:
        """What deliveries from here on compare with checksums."""
        self.engine.set_policy(BUCKET, BucketPolicy(verification=verification))

    def put(
        self,
        geometry: Geometry,
        keys: list[str],
        payload: memoryview,
        layerwise: bool = False,
        parent_key: str | None = None,
    ) -> None:
        """Store a prefix, in pieces as the server takes them out of shared memory."""
        shape = PrefixShape(keys, geometry.num_layers, geometry.slice_bytes, layerwise, parent_key)
        prefix = self.engine.stage_prefix(BUCKET, shape)
        try:
            step_bytes = piece_bytes(shape)
            for offset in range(0, shape.total_bytes, step_bytes):
                prefix.write(offset, payload[offset : min(offset + step_bytes, shape.total_bytes)])
            puts = [StagedPut(staged, "") for staged in prefix.staged]
            self.engine.commit(puts, Condition(immutable=True))
        finally:
            prefix.discard()

    def deliver(
        self,
        geometry: Geometry,
        keys: list[str],
        memory: memoryview | None,
        mode: str = "layerwise",
    ) -> None:
        """Read a prefix into memory of its size; without memory, piece by piece into a little of
        each reader's own.
        """
        storage = self.engine.settings
        opened = self.engine.open_many(BUCKET, keys, are_prefix=True)
        descriptor = Descriptor(
            tuple(keys),
            geometry.num_layers,
            geometry.chunk_tokens,
            geometry.slice_bytes,
            DeliveryMode(mode),
        )
        fragment_bytes = target_fragment_bytes(
            geometry.payload_bytes // geometry.num_layers,
            self.reader_threads,
            storage.fragment_bytes,
            storage.target_fragment_bytes_max,
        )
        plan = plan_chunks(descriptor, opened.placements(), descriptor.delivery, fragment_bytes)
        ended = threading.Event()
        transport = InPlace(memory) if memory is not None else Passing(fragment_bytes)
        recorder = DeliveryRecorder(
            "", BUCKET, "", started_s=time.monotonic(), started_unix_s=time.time()
        )
        delivery = ServedDelivery(plan, opened, transport, lambda _: ended.set(), recorder)
        layer_bytes = geometry.payload_bytes // geometry.num_layers
        self._dispatcher.add(delivery, Demand(layer_bytes, None, geometry.num_layers))
        ended.wait()
        self._dispatcher.remove(delivery)
        if delivery.error is not None:
            raise delivery.error

    def check(self, geometry: Geometry, keys: list[str], memory: memoryview) -> None:
        """Deliver once, untimed, and stop the benchmark if a byte is wrong."""
        self.deliver(geometry, keys, memory)
        payload = np.frombuffer(memory, np.uint8)[: geometry.payload_bytes]
        layers = payload.reshape(geometry.num_layers, geometry.chunk_count, geometry.slice_bytes)
        for layer, found in enumerate(layers):
            check_layer(geometry, keys, layer, found)

    def ranges(self) -> list[tuple[int, int]]:
        """Offset and length of all extents in the volume."""
        _, extents = self.engine.holdings.snapshot()
        rows = extents[extents["is_used"] & ~extents["is_freed"]]
        return sorted(
            zip(rows["offset_bytes"].tolist(), rows["length_bytes"].tolist(), strict=True)
        )

    def runs(self) -> list[FileRun]:
        """The same in the data files."""
        return [
            self._run(offset_bytes, length_bytes) for offset_bytes, length_bytes in self.ranges()
        ]

    def layer_runs(self) -> list[FileRun]:
        """What the only prefix of this store is read by, in the order in which a layerwise delivery
        needs it: a row of each extent, layer after layer.
        """
        _, extents = self.engine.holdings.snapshot()
        columns = extents[["offset_bytes", "slots", "num_layers", "slice_bytes"]]
        rows = columns[extents["is_used"]].tolist()  # in the order in which the put made them
        shapes = [(offset_bytes, ExtentGeometry(*shape)) for offset_bytes, *shape in rows]
        return [
            self._run(offset_bytes + shape.slice_offset_bytes(0, layer), shape.row_bytes)
            for layer in range(max(shape.num_layers for _, shape in shapes))
            for offset_bytes, shape in shapes
        ]

    def forget_cached(self) -> None:
        """Let the page cache forget the data files, and upkeep what it was to bring back."""
        self.engine.path_use.forget_missing()
        self.engine.upkeep.round()  # after the one that may be under way
        volume = self.engine.volume
        for segment in volume.segments():
            volume.drop_cache(segment * volume.segment_bytes, volume.segment_bytes)

    def hit_bytes(self) -> int:
        """Bytes that deliveries found in memory since the store was opened."""
        return sum(path.hit_bytes for path in self.engine.status().paths)

    def _run(self, offset_bytes: int, length_bytes: int) -> FileRun:
        segment, begin = divmod(offset_bytes, self.engine.volume.segment_bytes)
        return FileRun(data_file(self.folder, segment), begin, length_bytes)


def data_file(folder: Path, number: int) -> Path:
    """A data file of the store in `folder`."""
    return folder / "data" / f"{number:06d}"


@contextmanager
def opened_store(folder: Path, **storage: object) -> Generator[Store]:
    """Open a store with settings of `storage`; closed at the end."""
    settings = msgspec.structs.replace(StorageSettings(), **storage)
    engine = open_local_engine(folder, settings)
    service = Service(
        Settings(storage=settings, server=ServerSettings(data_dir=str(folder))), engine
    )
    try:
        yield Store(folder, engine, service)
    finally:
        service.schedule.dispatcher.close()
        engine.close()


class _Unbounded(Transport):
    """Takes everything at once, and tells nobody."""

    name = "benchmark"

    def reserve(self, offset_bytes: int, length_bytes: int) -> bool:
        return True

    def written(self, offset_bytes: int, length_bytes: int) -> None:
        """It is where it belongs."""

    def announce(self, end_layer: int) -> None:
        """Nobody waits for a layer."""

    def fail(self, failed_layer: int, error: ObjectCacheError) -> None:
        """The delivery has the error."""

    def close(self) -> None:
        """There is nothing to let go of."""


class InPlace(_Unbounded):
    """Into memory of the payload's size."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def memory(self, offset_bytes: int, length_bytes: int) -> memoryview:
        return self._memory[offset_bytes : offset_bytes + length_bytes]


class Passing(_Unbounded):
    """Into a fragment's memory of each reader's own, overwritten by its next."""

    def __init__(self, fragment_bytes: int) -> None:
        self._fragment_bytes = fragment_bytes
        self._local = threading.local()

    def memory(self, offset_bytes: int, length_bytes: int) -> memoryview:
        own: memoryview | None = getattr(self._local, "memory", None)
        if own is None:
            own = self._local.memory = block_aligned(self._fragment_bytes)
        return own[:length_bytes]


def block_aligned(length_bytes: int) -> memoryview:
    """Anonymous memory that the direct path can read into."""
    return memoryview(mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
