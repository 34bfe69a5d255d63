"""A running server with the requests' prefixes in it, and an engine that prefills from it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.basis.bench import Bench
from benchmarks.basis.prefix import check_layer, fill_chunks
from benchmarks.basis.server import Server
from benchmarks.basis.storage_socket import StorageSocket
from benchmarks.figures.gpu import Bytes, EmulatedGpu, Prefill
from benchmarks.figures.scaled import ScaledRequest
from objectcache import Client, KvBucket
from objectcache.deliveries.delivery import Delivery
from objectcache_schemas.operators.schedule import ScheduleChanges, ScheduleState, SetSchedule
from objectcache_schemas.operators.traces import DeliveryTrace, GetTraces, Traces

CACHED = f"storage.page_cache_bytes={1 << 40}"  # everything: what is measured is warm


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one prefill from the server came to."""

    prefill: Prefill
    started_s: float  # by time.monotonic
    request_id: str
    rate_bytes_per_s: int | None  # assigned
    accepted_s: float  # from the beginning until the fetch call returned
    arrivals_s: tuple[float, ...]  # of the layers, in the client's memory


@dataclass(slots=True)
class Served:
    """The server, a client of it, and the prefixes that it holds."""

    server: Server
    client: Client
    _prefixes: dict[ScaledRequest, tuple[KvBucket, list[str]]] = field(default_factory=dict)

    def load(self, request: ScaledRequest) -> None:
        """Put a request's prefix, once, read it back in both orders and check every byte."""
        if request in self._prefixes:
            return
        geometry = request.geometry
        name = f"g{geometry.chunk_tokens}-s{geometry.slice_bytes}-l{geometry.num_layers}"
        bucket = self.client.kv_bucket(name, geometry.layout(), create=True)
        keys = geometry.keys(series=len(self._prefixes))
        chunks = np.empty(
            (geometry.chunk_count, geometry.num_layers, geometry.slice_bytes), np.uint8
        )
        fill_chunks(chunks, geometry, keys)
        bucket.put(keys, chunks)
        self._prefixes[request] = bucket, keys
        for mode in ("layerwise", "chunkwise"):
            with bucket.fetch(keys, delivery=mode) as delivery:
                for layer, payload in delivery:
                    check_layer(geometry, keys, layer, payload)

    def gpu(self, request: ScaledRequest, whole: bool = False) -> EmulatedGpu:
        """A GPU with memory for two layers of the request, or for all of them."""
        layers = request.num_layers if whole else 2
        return EmulatedGpu(request.paper.window_s, layers * request.layer_bytes)

    def prefill(
        self, request: ScaledRequest, gpu: EmulatedGpu, transport: str = "shared_memory"
    ) -> Fetched:
        """Layer by layer (paper: S3Agg-LW)."""
        bucket, keys = self._prefixes[request]
        started_s = time.monotonic()
        with bucket.fetch(
            keys,
            delivery="layerwise",
            compute_window_s=gpu.window_s,
            transport=transport,
        ) as delivery:
            accepted_s = time.monotonic() - started_s
            delivery.report_explicitly()
            source = _Reporting(delivery, gpu.window_s)
            prefill = gpu.prefill_layers(source, request.num_layers, started_s)
            arrivals_s = tuple(at_s or 0.0 for at_s in delivery.arrivals_s)
            rate, request_id = delivery.rate_bytes_per_s, delivery.request_id
        return Fetched(prefill, started_s, request_id, rate, accepted_s, arrivals_s)

    def prefill_whole(self, request: ScaledRequest, gpu: EmulatedGpu) -> Fetched:
        """All chunks, then all of the computing (paper: S3Batch-CW)."""
        bucket, keys = self._prefixes[request]
        started_s = time.monotonic()
        with bucket.fetch(keys, delivery="chunkwise", transport="shared_memory") as delivery:
            accepted_s = time.monotonic() - started_s

            def load(memory: Bytes) -> None:
                chunks = delivery.wait().transpose(1, 0, 2)  # as they lie in memory
                np.copyto(memory[: chunks.size].reshape(chunks.shape), chunks)

            prefill = gpu.prefill_whole(load, request.num_layers, started_s)
            return Fetched(
                prefill, started_s, delivery.request_id, None, accepted_s, prefill.loaded_s
            )

    def schedule(self, changes: ScheduleChanges) -> ScheduleState:
        """Change the schedule, as `objectcache admin schedule` does."""
        with closing(StorageSocket(self.server.settings)) as storage:
            return storage.ask(SetSchedule(changes=changes), ScheduleState)

    def trace(self, request_id: str) -> DeliveryTrace:
        """The server's own account of a delivery."""
        with closing(StorageSocket(self.server.settings)) as storage:
            return storage.ask(GetTraces(request_id=request_id), Traces).traces[0]


class _Reporting:
    """A delivery as the GPU's source: what is consumed is told to the server."""

    def __init__(self, delivery: Delivery, window_s: float) -> None:
        self._delivery = delivery
        self._window_s = window_s

    def wait_layer(self, layer: int) -> Bytes:
        return self._delivery.wait_layer(layer)

    def consumed(self, layer: int) -> None:
        self._delivery.consumed(layer, self._window_s)


@contextmanager
def served(bench: Bench, *assignments: str) -> Generator[Served]:
    """A server whose page cache holds everything, with settings `section.key=value`."""
    with bench.server(CACHED, *assignments) as server, server.client("shared_memory") as client:
        yield Served(server, client)
