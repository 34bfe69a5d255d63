"""The rate of puts, which answer when the bytes are on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import DISK_WRITE_BYTES_PER_S, Row, Samples, rates
from benchmarks.basis.prefix import Geometry, fill_chunks
from benchmarks.basis.server import Server
from benchmarks.basis.store import BUCKET, Store
from benchmarks.machine.device import DeviceLimit, device_writes
from benchmarks.machine.page_cache_writes import CACHED_FRESH, PageCacheWrites
from objectcache import KvBucket, SharedMemoryTarget
from objectcache_schemas.limits import GIB, MIB

FRESH, IN_PROCESS, IN_PROCESS_LAYERS, DIRECT = (
    "in process, into fresh space",
    "in process",
    "in process, layerwise",
    "in process, past the page cache",
)
TARGET, ARRAY, BODY, LAYERS, LAYERS_BODY = (
    "served, out of a target",
    "served, out of an array, copied",
    "served, in a body",
    "served, layer by layer",
    "served, layer by layer in a body",
)
GOAL = 0.8  # of the device
JUDGED = (FRESH, IN_PROCESS, IN_PROCESS_LAYERS, DIRECT, TARGET)


def measure_puts(bench: Bench) -> Iterator[Row]:
    """Rows for every way into the store, and for plain writes of as many bytes.

    What was put is deleted before the next, so that all but the first are written where something
    lay before: the steady state of a cache. The store that gets fresh space deletes nothing.
    """
    geometry = Geometry(16, bench.scale.chunk_count)
    samples = Samples()
    with ExitStack() as stack:
        folder = stack.enter_context(bench.place())
        server = stack.enter_context(bench.server())
        reused, fresh = (stack.enter_context(bench.store()) for _ in range(2))
        direct = stack.enter_context(bench.store(page_cache_bytes=0))
        puts = stack.enter_context(_Puts(server, geometry))
        limits = [
            device_writes(
                folder / name, geometry.payload_bytes, fresh=is_fresh, is_quick=bench.scale.is_quick
            )
            for name, is_fresh in (("again", False), ("fresh", True))
        ]
        cached = PageCacheWrites(folder, puts.target.array.data)
        for number in range(bench.scale.rounds + 1):
            ours = samples if number else Samples()
            keys = geometry.keys(series=1 + number)
            for limit in limits:
                limit.take(samples)
            puts.fill(keys)
            cached.take(ours)
            _take_in_process(ours, reused, fresh, direct, puts, keys)
            puts.take(ours, keys)
    yield from _rows(samples, geometry, limits)


def _take_in_process(
    samples: Samples, reused: Store, fresh: Store, direct: Store, puts: _Puts, keys: list[str]
) -> None:
    geometry, payload = puts.geometry, puts.target.array.data
    samples.take(FRESH, lambda: fresh.put(geometry, keys, payload))
    for name, layerwise in ((IN_PROCESS, False), (IN_PROCESS_LAYERS, True)):
        samples.take(name, lambda way=layerwise: reused.put(geometry, keys, payload, way))  # type: ignore[misc]
        reused.engine.delete(BUCKET, keys)
    samples.take(DIRECT, lambda: direct.put(geometry, keys, payload))
    direct.engine.delete(BUCKET, keys)


class _Puts:
    """Every way to put the chunks that lie in a target, through the whole stack."""

    def __init__(self, server: Server, geometry: Geometry) -> None:
        self.geometry = geometry
        self._server = server
        self._client = server.client()
        self._bucket: KvBucket = self._client.kv_bucket("puts", geometry.layout(), create=True)
        self.target: SharedMemoryTarget = self._client.shared_memory_target(geometry.payload_bytes)
        self._chunks = self.target.chunks(geometry.chunk_count, geometry.layout())
        self._array = np.empty_like(self._chunks)

    def fill(self, keys: list[str]) -> None:
        """Lay the bytes of `keys` where they are put from."""
        fill_chunks(self._chunks, self.geometry, keys)
        self._array[:] = self._chunks

    def take(self, samples: Samples, keys: list[str]) -> None:
        """Put the same chunks in each way."""
        for name, put in self._ways(keys).items():
            samples.take(name, put)
            self._server.delete(self._bucket.name, keys)

    def _ways(self, keys: list[str]) -> dict[str, Callable[[], object]]:
        bucket = self._bucket
        return {
            TARGET: lambda: bucket.put(keys, self._chunks, transport="shared_memory"),
            ARRAY: lambda: bucket.put(keys, self._array, transport="shared_memory"),
            BODY: lambda: bucket.put(keys, self._array, transport="body"),
            LAYERS: lambda: self._put_layers(keys, "shared_memory"),
            LAYERS_BODY: lambda: self._put_layers(keys, "body"),
        }

    def _put_layers(self, keys: list[str], transport: str) -> None:
        layers = self._array.reshape(self.geometry.num_layers, self.geometry.chunk_count, -1)
        with self._bucket.put_layers(keys, transport=transport) as put:
            for layer in layers:
                put.write_layer(layer)

    def __enter__(self) -> _Puts:
        return self

    def __exit__(self, *_: object) -> None:
        self.target.close()
        self._client.close()


def _rows(samples: Samples, geometry: Geometry, limits: list[DeviceLimit]) -> Iterator[Row]:
    again, fresh = (limit.best(samples) for limit in limits)
    size = f"{geometry.payload_bytes / MIB:.0f} MiB in {geometry.chunk_count} chunks, {geometry}"
    shown = [
        (name, fresh if "fresh space" in name else again, name, name in JUDGED)
        for name in samples.seconds
    ]
    shown.append((FRESH, CACHED_FRESH, f"{FRESH}, against the page cache", False))
    for name, limit, text, is_judged in shown:
        yield Row(
            group=f"Puts, on the device when they answer: {size}",
            name=text,
            unit="GiB/s",
            samples=rates(samples.seconds[name], geometry.payload_bytes),
            ratio=samples.median_s(limit) / samples.median_s(name),
            ratio_of=limit,
            goal=f"at least {GOAL}" if is_judged else "",
            by_hand=f"a device that writes {DISK_WRITE_BYTES_PER_S / GIB:.0f} GiB/s",
            details={"payload_bytes": geometry.payload_bytes},
            settings="storage.page_cache_bytes=0" if name == DIRECT else "",
        )
