"""The time until an engine can begin: the first layer of a prefix, against ordinary S3 reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp
from yarl import URL

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import (
    COPY_BYTES_PER_S_PER_THREAD,
    HTTP_ROUND_TRIP_S,
    LOOPBACK_BYTES_PER_S,
    SDK_REQUEST_S,
    Row,
    Samples,
    milliseconds,
)
from benchmarks.basis.prefix import LAYERS, Geometry
from benchmarks.basis.server import Server
from objectcache import KvBucket
from objectcache_laboratory.replay.kv_bytes import KvBytes

GROUP = "Until an engine can begin: the first layer of a prefix"
BUCKET = "first-layer"
CONCURRENCY = 16
URL_EXPIRES_S = 3600
GOAL = 0.1  # of whole objects by boto3

OURS_FIRST = {way: f"layerwise, {way}: first layer" for way in ("shared_memory", "body")}
OURS_LAST = {way: f"layerwise, {way}: last layer" for way in ("shared_memory", "body")}
BOTO3_WHOLE = f"boto3, whole objects, {CONCURRENCY} at once"
BOTO3_RANGES = f"boto3, ranges of layer 0, {CONCURRENCY} at once"
AIOHTTP_WHOLE = f"aiohttp, whole objects, {CONCURRENCY} at once"
AIOHTTP_RANGES = f"aiohttp, ranges of layer 0, {CONCURRENCY} at once"
AIOHTTP_ALL_RANGES = f"aiohttp, ranges of all layers, {CONCURRENCY} at once"


def measure_first_layer(bench: Bench) -> Iterator[Row]:
    """Rows for both transports and for four ways of reading the objects as plain S3."""
    geometry, repeats = Geometry(16, bench.scale.first_layer_chunks), bench.scale.repeats
    keys = geometry.keys()
    samples = Samples()
    with bench.server() as server:
        with server.client() as client:
            bucket = client.kv_bucket(BUCKET, geometry.layout(), create=True)
            bucket.put(keys, KvBytes(geometry.layout()).chunks(keys))
            for repeat in range(repeats + 1):
                for transport in OURS_FIRST:
                    _sample_ours(samples, bucket, keys, transport, warm=repeat > 0)
        _sample_boto3(samples, server, geometry, keys, repeats)
        asyncio.run(_sample_aiohttp(samples, server, geometry, keys, repeats))
    yield from _rows(samples, geometry)


def _sample_ours(
    samples: Samples, bucket: KvBucket, keys: Sequence[str], transport: str, warm: bool
) -> None:
    begin_s = time.perf_counter()
    with bucket.fetch(keys, delivery="layerwise", transport=transport) as delivery:
        delivery.wait_layer(0)
        first_s = time.perf_counter() - begin_s
        delivery.wait()
        last_s = time.perf_counter() - begin_s
    if warm:
        samples.add(OURS_FIRST[transport], first_s)
        samples.add(OURS_LAST[transport], last_s)


def _sample_boto3(
    samples: Samples, server: Server, geometry: Geometry, keys: Sequence[str], repeats: int
) -> None:
    s3 = server.s3(CONCURRENCY)
    layer_range = f"bytes=0-{geometry.slice_bytes - 1}"

    def whole(key: str) -> None:
        s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def first_slice(key: str) -> None:
        s3.get_object(Bucket=BUCKET, Key=key, Range=layer_range)["Body"].read()

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(first_slice, keys))
        for _ in range(repeats):
            samples.take(BOTO3_WHOLE, lambda: list(pool.map(whole, keys)))
            samples.take(BOTO3_RANGES, lambda: list(pool.map(first_slice, keys)))
    s3.close()


async def _sample_aiohttp(
    samples: Samples, server: Server, geometry: Geometry, keys: Sequence[str], repeats: int
) -> None:
    """The leanest ordinary client: signed URLs made beforehand, one event loop, no SDK."""
    s3 = server.s3(CONCURRENCY)
    parameters = [{"Bucket": BUCKET, "Key": key} for key in keys]
    urls = [
        URL(s3.generate_presigned_url("get_object", some, URL_EXPIRES_S), encoded=True)
        for some in parameters
    ]
    s3.close()
    slice_bytes = geometry.slice_bytes
    ranges = [
        {"Range": f"bytes={layer * slice_bytes}-{(layer + 1) * slice_bytes - 1}"}
        for layer in range(LAYERS)
    ]
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=CONCURRENCY), raise_for_status=True
    ) as session:

        async def get(url: URL, headers: dict[str, str]) -> None:
            async with session.get(url, headers=headers) as response:
                await response.read()

        async def get_all(headers: Sequence[dict[str, str]]) -> None:
            await asyncio.gather(*(get(url, some) for some in headers for url in urls))

        await get_all(ranges[:1])
        for _ in range(repeats):
            await _take(samples, AIOHTTP_WHOLE, lambda: get_all([{}]))
            await _take(samples, AIOHTTP_RANGES, lambda: get_all(ranges[:1]))
        await _take(samples, AIOHTTP_ALL_RANGES, lambda: get_all(ranges))


async def _take(samples: Samples, name: str, work: Callable[[], Awaitable[None]]) -> None:
    begin_s = time.perf_counter()
    await work()
    samples.add(name, time.perf_counter() - begin_s)


def _rows(samples: Samples, geometry: Geometry) -> Iterator[Row]:
    whole_s = samples.median_s(BOTO3_WHOLE)
    for name, seconds in samples.seconds.items():
        judged = name in OURS_FIRST.values()
        yield Row(
            group=GROUP,
            name=f"{name}, {geometry.chunk_count} chunks",
            unit="ms",
            samples=milliseconds(seconds),
            ratio=samples.median_s(name) / whole_s,
            ratio_of=BOTO3_WHOLE,
            goal=f"at most {GOAL}" if judged else "",
            by_hand=_by_hand(name, geometry),
        )


def _by_hand(name: str, geometry: Geometry) -> str:
    layer_bytes = geometry.chunk_count * geometry.slice_bytes
    if name in OURS_FIRST.values():
        seconds = HTTP_ROUND_TRIP_S + layer_bytes / COPY_BYTES_PER_S_PER_THREAD
        return f"one round trip + one layer: {1000 * seconds:.1f} ms"
    if name in OURS_LAST.values():
        seconds = HTTP_ROUND_TRIP_S + geometry.payload_bytes / COPY_BYTES_PER_S_PER_THREAD
        return f"one round trip + the payload: {1000 * seconds:.0f} ms"
    requests = geometry.chunk_count * (LAYERS if name == AIOHTTP_ALL_RANGES else 1)
    each_s = SDK_REQUEST_S if name.startswith("boto3") else HTTP_ROUND_TRIP_S
    sent_bytes = layer_bytes if "ranges of layer 0" in name else geometry.payload_bytes
    seconds = requests * each_s + sent_bytes / LOOPBACK_BYTES_PER_S
    return f"{requests:,} requests + {sent_bytes >> 20} MiB: {1000 * seconds:.0f} ms"
