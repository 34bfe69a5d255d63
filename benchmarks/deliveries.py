"""Warm deliveries of a whole prefix, through shared memory and through a socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.limits import PageCacheCopy, loopback_stream
from benchmarks.measure import (
    COPY_BYTES_PER_S_PER_THREAD,
    LOOPBACK_BYTES_PER_S,
    Row,
    Samples,
    rates,
)
from benchmarks.prefix import Geometry, check_delivery, object_files, put_prefix
from benchmarks.server import Server
from objectcache import KvBucket, SharedMemoryTarget
from objectcache_schemas.limits import GIB, MIB

MODES = ("layerwise", "chunkwise")
TRANSPORTS = ("shared_memory", "body")
TARGET, ANONYMOUS, STREAM = "page cache to the target", "page cache to anonymous", "TCP"
SHARED_MEMORY_GOAL, BODY_GOAL = 0.6, 0.4  # of the limit, layerwise at G=16


def measure_deliveries(server: Server, geometries: list[Geometry], repeats: int) -> Iterator[Row]:
    """Rows for every geometry, mode and transport, and for the limits."""
    with server.client() as client:
        for geometry in geometries:
            bucket = client.kv_bucket(
                f"warm-{geometry.chunk_tokens}", geometry.layout(), create=True
            )
            keys = geometry.keys()
            put_prefix(bucket, geometry, keys)
            for transport in TRANSPORTS:
                check_delivery(bucket, geometry, keys, transport)
            target = client.shared_memory_target(geometry.payload_bytes)
            samples = _sample(server, bucket, geometry, target, repeats)
            target.close()
            yield from _rows(geometry, samples)


def _sample(
    server: Server, bucket: KvBucket, geometry: Geometry, target: SharedMemoryTarget, repeats: int
) -> Samples:
    samples, keys = Samples(), geometry.keys()

    def deliver(mode: str, transport: str) -> None:
        with bucket.fetch(keys, delivery=mode, transport=transport, target=target) as delivery:
            delivery.wait()

    with ExitStack() as stack:
        files = object_files(server, geometry)[: geometry.chunk_count]
        memory = target.array.data[: geometry.payload_bytes]
        copy = PageCacheCopy(files, geometry.chunk_bytes, memory, stack)
        stream = stack.enter_context(loopback_stream(geometry.payload_bytes))
        stream.receive()
        for _ in range(repeats):
            samples.take(TARGET, copy.into_target)
            samples.take(ANONYMOUS, copy.into_anonymous_memory)
            samples.take(STREAM, stream.receive)
            for mode in MODES:
                for transport in TRANSPORTS:
                    name = f"{mode}, {transport}"
                    samples.take(name, lambda mode=mode, way=transport: deliver(mode, way))  # type: ignore[misc]
    return samples


def _rows(geometry: Geometry, samples: Samples) -> Iterator[Row]:
    count_bytes = geometry.payload_bytes
    for mode in MODES:
        for transport in TRANSPORTS:
            shared = transport == "shared_memory"
            name, limit = f"{mode}, {transport}", TARGET if shared else STREAM
            goal = SHARED_MEMORY_GOAL if shared else BODY_GOAL
            judged = mode == "layerwise" and geometry.chunk_tokens == 16
            yield Row(
                group=_group(geometry),
                name=f"{name}, {geometry}",
                unit="GiB/s",
                samples=rates(samples.seconds[name], count_bytes),
                ratio=samples.median_s(limit) / samples.median_s(name),
                ratio_of=limit,
                goal=f"at least {goal}" if judged else "",
                by_hand=_by_hand(transport),
                details={
                    "payload_bytes": count_bytes,
                    "chunk_count": geometry.chunk_count,
                    "slice_bytes": geometry.slice_bytes,
                },
            )
    for limit in (TARGET, ANONYMOUS, STREAM):
        yield Row(
            group=_group(geometry),
            name=f"limit: {limit}, files of {geometry}",
            unit="GiB/s",
            samples=rates(samples.seconds[limit], count_bytes),
            ratio=None,
            ratio_of="",
            goal="",
            by_hand=_by_hand("body" if limit == STREAM else "shared_memory"),
        )


def _group(geometry: Geometry) -> str:
    size = f"{geometry.payload_bytes / MIB:.0f} MiB in {geometry.chunk_count} chunks"
    return f"Warm deliveries of {size}, {geometry}"


def _by_hand(transport: str) -> str:
    if transport == "body":
        return f"one stream, {LOOPBACK_BYTES_PER_S / GIB:.0f} GiB/s"
    return f"2 threads x {COPY_BYTES_PER_S_PER_THREAD / GIB:.0f} GiB/s"
