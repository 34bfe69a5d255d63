"""Warm deliveries of a whole prefix: in process, through shared memory and through a socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import (
    COPY_BYTES_PER_S_PER_THREAD,
    LOOPBACK_BYTES_PER_S,
    Row,
    Samples,
    rates,
)
from benchmarks.basis.prefix import Geometry, check_delivery, fill_chunks
from benchmarks.basis.server import Server
from benchmarks.basis.store import Store
from benchmarks.machine.loopback import loopback_stream
from benchmarks.machine.page_cache_copy import PageCacheCopy
from objectcache import KvBucket, SharedMemoryTarget
from objectcache_schemas.limits import GIB, MIB
from objectcache_schemas.records import Verification

COPY = "limit: two threads copy to the target"
ANONYMOUS = "limit: two threads copy to anonymous memory"
STREAM = "limit: one TCP stream"
SENDFILE = "limit: one TCP stream by sendfile"
CACHED_BYTES = 1 << 40  # page_cache_bytes: everything
CACHED = f"storage.page_cache_bytes={CACHED_BYTES}"
CACHED_SHOWN = "storage.page_cache_bytes=2^40"
GOALS = {Verification.FULL: 0.7, Verification.SAMPLED: 0.85}  # of the copy, layerwise at G=16
BODY_GOAL = 0.8  # of the stream, the same


@dataclass(frozen=True, slots=True)
class Way:
    """How a prefix is delivered."""

    mode: str
    transport: str  # in process, shared_memory or body
    verification: Verification = Verification.FULL

    @property
    def limit(self) -> str:
        """What it is measured by."""
        return STREAM if self.transport == "body" else COPY

    @property
    def goal(self) -> str:
        """What is asked of it at G=16."""
        if self.mode != "layerwise" or self.verification is Verification.OFF:
            return ""
        goal = BODY_GOAL if self.transport == "body" else GOALS[self.verification]
        return f"at least {goal}"

    @property
    def settings(self) -> str:
        """What differs from the defaults."""
        if self.verification is Verification.FULL:
            return CACHED_SHOWN
        return f"{CACHED_SHOWN}, the bucket's verification {self.verification.value}"

    def __str__(self) -> str:
        return f"{self.mode}, {self.transport}, verification {self.verification.value}"


LAYERWISE = tuple(
    Way("layerwise", transport, verification)
    for transport in ("in process", "shared_memory", "body")
    for verification in Verification
)
CHUNKWISE = (Way("chunkwise", "shared_memory"), Way("chunkwise", "body"))
LARGE_CHUNKS = tuple(Way("layerwise", way) for way in ("in process", "shared_memory", "body"))


def measure_warm(bench: Bench) -> Iterator[Row]:
    """Rows for chunks of 16 tokens in every way, and for chunks of 256 in some."""
    geometry = Geometry(16, bench.scale.chunk_count)
    with bench.server(CACHED) as server:
        yield from _measure(bench, server, geometry, LAYERWISE + CHUNKWISE)
        yield from _measure(bench, server, geometry.in_chunks_of(256), LARGE_CHUNKS)


def _measure(
    bench: Bench, server: Server, geometry: Geometry, ways: tuple[Way, ...]
) -> Iterator[Row]:
    keys, name = geometry.keys(), f"warm-{geometry.chunk_tokens}"
    with server.client() as client, bench.store(page_cache_bytes=CACHED_BYTES) as store:
        bucket = client.kv_bucket(name, geometry.layout(), create=True)
        target = client.shared_memory_target(geometry.payload_bytes)
        chunks = target.chunks(geometry.chunk_count, geometry.layout())
        fill_chunks(chunks, geometry, keys)
        bucket.put(keys, chunks)
        store.put(geometry, keys, target.array.data)
        store.check(geometry, keys, target.array.data)
        for transport in ("shared_memory", "body"):
            check_delivery(bucket, geometry, keys, transport)
        deliveries = _Deliveries(server, store, bucket, geometry, target)
        samples = _sample(deliveries, ways, bench.scale.repeats)
        target.close()
    yield from _rows(geometry, ways, samples)


class _Deliveries:
    """The same prefix in every way, into the same target."""

    def __init__(
        self,
        server: Server,
        store: Store,
        bucket: KvBucket,
        geometry: Geometry,
        target: SharedMemoryTarget,
    ) -> None:
        self.store = store
        self.geometry = geometry
        self.memory = target.array.data
        self._server = server
        self._bucket = bucket
        self._target = target
        self._keys = geometry.keys()

    def prepare(self, way: Way) -> None:
        """Let the bucket be verified as `way` says."""
        if way.transport == "in process":
            self.store.verify(way.verification)
        else:
            self._server.verify(self._bucket.name, way.verification)

    def deliver(self, way: Way) -> None:
        """Deliver once."""
        if way.transport == "in process":
            self.store.deliver(self.geometry, self._keys, self.memory, way.mode)
            return
        with self._bucket.fetch(
            self._keys, delivery=way.mode, transport=way.transport, target=self._target
        ) as delivery:
            delivery.wait()


def _sample(deliveries: _Deliveries, ways: tuple[Way, ...], repeats: int) -> Samples:
    samples, payload_bytes = Samples(), deliveries.geometry.payload_bytes
    runs = deliveries.store.runs()
    with ExitStack() as stack:
        copy = PageCacheCopy(runs, deliveries.memory, stack)
        stream = stack.enter_context(loopback_stream(payload_bytes, runs))
        stream.from_memory()
        for _ in range(repeats):
            samples.take(COPY, copy.into_target)
            samples.take(ANONYMOUS, copy.into_anonymous_memory)
            samples.take(STREAM, stream.from_memory)
            samples.take(SENDFILE, stream.from_files)
            for way in ways:
                deliveries.prepare(way)
                samples.take(str(way), lambda way=way: deliveries.deliver(way))  # type: ignore[misc]
    return samples


def _rows(geometry: Geometry, ways: tuple[Way, ...], samples: Samples) -> Iterator[Row]:
    size = f"{geometry.payload_bytes / MIB:.0f} MiB in {geometry.chunk_count} chunks"
    limits = {str(way): way.limit for way in ways} | {COPY: COPY, ANONYMOUS: COPY}
    limits |= {STREAM: STREAM, SENDFILE: STREAM}
    goals = {str(way): way.goal for way in ways if geometry.chunk_tokens == 16}
    verified = {str(way): way.settings for way in ways}
    for name, limit in limits.items():
        yield Row(
            group=f"Warm deliveries of {size}, {geometry}",
            name=name,
            unit="GiB/s",
            samples=rates(samples.seconds[name], geometry.payload_bytes),
            ratio=samples.median_s(limit) / samples.median_s(name),
            ratio_of=limit,
            goal=goals.get(name, ""),
            by_hand=_by_hand(limit),
            details={"payload_bytes": geometry.payload_bytes},
            settings=verified.get(name, ""),
        )


def _by_hand(limit: str) -> str:
    if limit == STREAM:
        return f"one stream, {LOOPBACK_BYTES_PER_S / GIB:.0f} GiB/s"
    return f"2 threads x {COPY_BYTES_PER_S_PER_THREAD / GIB:.0f} GiB/s"
