"""Figure 11: throughput against the size of chunks, of one request for all and of one for each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from benchmarks.basis.prefix import Geometry, check_delivery, fill_chunks
from benchmarks.basis.server import Server
from benchmarks.figures.carriers import CARRIERS, HTTP, series, transports
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import legend_above, lines, panels
from benchmarks.figures.served import CACHED
from objectcache import KvBucket
from objectcache_schemas.limits import KIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONE_REQUEST = {"layerwise": "S3RDMA Agg", "chunkwise": "S3RDMA Batch"}
TCP = series(HTTP, "a GET a chunk", "S3TCP")
CHUNK_TOKENS = (16, 32, 64, 128, 256, 512)
QUICK_CHUNK_TOKENS = (16, 512)
CONTEXT_TOKENS = 65536  # of the paper's largest request, before scaling
QUICK_LAYERS = 8
REPEATS, QUICK_REPEATS = 5, 1
CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class AggregationRow:
    """One way to fetch the same bytes; the median of `samples`."""

    path: str
    chunk_tokens: int
    slice_kib: float
    chunk_count: int
    requests: int
    payload_mib: float
    samples: int
    time_ms: float
    gbytes_per_s: float
    gbps: float


class AggregationExperiment(Experiment[AggregationRow]):
    """Figure 11. One GET a chunk by an S3 SDK's threads, and one request in all, over each
    transport into memory that this machine has.
    """

    name: ClassVar[str] = "aggregation"
    title: ClassVar[str] = "Figure 11: throughput against chunk size"
    conditions: ClassVar[str] = (
        "Bytes are the paper's over the scale, chunks as large. One host: bytes go over loopback "
        "or through memory, none over RDMA. Warm."
    )

    def run(self, context: Context) -> list[AggregationRow]:
        repeats = QUICK_REPEATS if context.is_quick else REPEATS
        rows: list[AggregationRow] = []
        with context.bench.server(CACHED) as server:
            for geometry in geometries(context.scale, context.is_quick):
                context.say(str(geometry))
                rows += _measure(server, geometry, repeats)
        return rows

    def plot(self, rows: Sequence[AggregationRow]) -> Figure:
        figure, (panel,) = panels(1, 1)
        shown = {
            path: (
                [float(row.chunk_tokens) for row in rows if row.path == path],
                [row.gbytes_per_s for row in rows if row.path == path],
            )
            for path in dict.fromkeys(row.path for row in rows)
        }
        lines(panel, shown)
        panel.set_xscale("log", base=2)
        ticks = sorted({row.chunk_tokens for row in rows})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set_xlabel("tokens a chunk (G)")
        panel.set_ylabel("GB/s")
        panel.set_ylim(bottom=0)
        legend_above(figure, panel)
        return figure

    def notes(self, rows: Sequence[AggregationRow]) -> list[str]:
        """How far the smallest chunks lie below the largest."""
        return [
            f"{path}: G={least.chunk_tokens} reaches {least.gbps / most.gbps:.2f} of "
            f"G={most.chunk_tokens}"
            for path in dict.fromkeys(row.path for row in rows)
            for least, most in [_ends([row for row in rows if row.path == path])]
        ]


def of_one_request(transport: str, mode: str) -> str:
    """The name of a series of one request for all chunks."""
    return series(CARRIERS[transport], f"one {mode} request", ONE_REQUEST[mode])


def geometries(scale: int, is_quick: bool) -> Iterator[Geometry]:
    """The same bytes in chunks of every size."""
    tokens = CONTEXT_TOKENS // scale
    largest = max(CHUNK_TOKENS)
    tokens = max(largest, tokens - tokens % largest)
    for chunk_tokens in QUICK_CHUNK_TOKENS if is_quick else CHUNK_TOKENS:
        whole = Geometry(chunk_tokens, tokens // chunk_tokens)
        if is_quick:
            yield Geometry(chunk_tokens, whole.chunk_count, num_layers=QUICK_LAYERS)
        else:
            yield whole


def _ends(rows: Sequence[AggregationRow]) -> tuple[AggregationRow, AggregationRow]:
    ordered = sorted(rows, key=lambda row: row.chunk_tokens)
    return ordered[0], ordered[-1]


def _measure(server: Server, geometry: Geometry, repeats: int) -> Iterator[AggregationRow]:
    """All paths in turn, so that a slow spell of the machine hits each of them."""
    keys = geometry.keys()
    with (
        server.client("shared_memory") as client,
        ThreadPoolExecutor(CONNECTIONS) as threads,
    ):
        bucket = client.kv_bucket(f"g{geometry.chunk_tokens}", geometry.layout(), create=True)
        _put(bucket, geometry, keys)
        s3 = server.s3(CONNECTIONS)
        memory = np.ones((geometry.chunk_count, geometry.chunk_bytes), np.uint8)
        ways: dict[str, Callable[[], None]] = {
            of_one_request(transport, mode): partial(_fetch, bucket, keys, mode, transport)
            for transport in transports()
            for mode in ONE_REQUEST
        }
        ways[TCP] = lambda: _get_each(s3, bucket.name, keys, memory, threads)
        for transport in transports():
            check_delivery(bucket, geometry, keys, transport)  # also touches the memory once
        times_s: dict[str, list[float]] = {path: [] for path in ways}
        for _ in range(repeats):
            for path, way in ways.items():
                begun_s = time.monotonic()
                way()
                times_s[path].append(time.monotonic() - begun_s)
        s3.close()
    server.delete(bucket.name, keys)
    for path, taken_s in times_s.items():
        yield row_of(geometry, path, taken_s)


def row_of(geometry: Geometry, path: str, times_s: Sequence[float]) -> AggregationRow:
    """The row of one path."""
    time_s = statistics.median(times_s)
    return AggregationRow(
        path,
        geometry.chunk_tokens,
        geometry.slice_bytes / KIB,
        geometry.chunk_count,
        geometry.chunk_count if path == TCP else 1,
        geometry.payload_bytes / MIB,
        len(times_s),
        time_s * 1e3,
        geometry.payload_bytes / time_s / 1e9,
        geometry.payload_bytes * 8 / time_s / 1e9,
    )


def _put(bucket: KvBucket, geometry: Geometry, keys: list[str]) -> None:
    chunks = np.empty((geometry.chunk_count, geometry.num_layers, geometry.slice_bytes), np.uint8)
    fill_chunks(chunks, geometry, keys)
    bucket.put(keys, chunks)


def _fetch(bucket: KvBucket, keys: list[str], mode: str, transport: str) -> None:
    with bucket.fetch(keys, delivery=mode, transport=transport) as delivery:
        delivery.report_explicitly()
        delivery.wait()


def _get_each(
    s3: Any, bucket: str, keys: Sequence[str], memory: Any, threads: ThreadPoolExecutor
) -> None:
    def get(index: int) -> None:
        body = s3.get_object(Bucket=bucket, Key=keys[index])["Body"]
        into, received = memoryview(memory[index]), 0
        while received < len(into):
            count = body.readinto(into[received:])
            if not count:
                raise SystemExit(f"chunk {keys[index]} ended after {received} bytes")
            received += count
        body.close()

    list(threads.map(get, range(len(keys))))
