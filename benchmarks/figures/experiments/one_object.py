"""Figures 9 and 10: one object in an HTTP body, and into memory staged in the gateway or past it.

The paper calls the three S3TCP, S3RDMA Buffer and S3RDMA Direct. No byte goes over RDMA here: what
lies on one host goes through shared memory, or is copied between the processes.

What it takes with one request at a time is split as the server's own trace splits it, which is the
paper's figure 10.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from benchmarks.basis.prefix import Geometry
from benchmarks.basis.server import Server
from benchmarks.figures.carriers import CARRIERS, HTTP, SHARED_MEMORY, series, transports
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import legend_above, lines, panels
from benchmarks.figures.served import CACHED, Served
from objectcache import Client, KvBucket
from objectcache.landing.targets import SessionTarget
from objectcache_schemas.limits import KIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TCP = series(HTTP, "one GET", "S3TCP")
PATHS = {
    "buffer": ("staged in the gateway", "S3RDMA Buffer"),
    "direct": ("past the gateway", "S3RDMA Direct"),
}
OBJECT_KIB = (64, 256, 1024, 4096)
QUICK_OBJECT_KIB = (64, 4096)
CONCURRENCY = (1, 8)
OBJECTS = 16
REQUESTS, QUICK_REQUESTS = 96, 24
NUM_LAYERS = 4
TOKEN_BYTES = 1 * KIB


@dataclass(frozen=True, slots=True)
class PathRow:
    """One path, one size, so many requests at once. Times are medians of single requests."""

    path: str
    object_kib: int
    concurrency: int
    requests: int
    request_ms: float
    p99_ms: float
    gbytes_per_s: float
    storage_ms: float | None  # of the server's trace; None where several requests ran at once
    network_ms: float | None
    control_plane_ms: float | None


class OneObjectExperiment(Experiment[PathRow]):
    """Figures 9 and 10, warm, on this machine."""

    name: ClassVar[str] = "one_object"
    title: ClassVar[str] = "Figures 9 and 10: one object by each path"
    conditions: ClassVar[str] = (
        "Nothing is scaled. One host: bytes go over loopback or through memory, none over RDMA, "
        "which the paper's Buffer and Direct went over; 8 at once where the paper has 8 and 32."
    )

    def run(self, context: Context) -> list[PathRow]:
        requests = QUICK_REQUESTS if context.is_quick else REQUESTS
        rows: list[PathRow] = []
        with context.bench.server(CACHED) as server:
            for object_kib in QUICK_OBJECT_KIB if context.is_quick else OBJECT_KIB:
                context.say(f"{object_kib} KiB")
                rows += _measure(server, object_kib, requests)
        return rows

    def plot(self, rows: Sequence[PathRow]) -> Figure:
        figure, axes = panels(1, len(CONCURRENCY))
        for panel, concurrency in zip(axes, CONCURRENCY, strict=True):
            of_panel = [row for row in rows if row.concurrency == concurrency]
            shown = {
                path: (
                    [float(row.object_kib) for row in of_panel if row.path == path],
                    [row.gbytes_per_s for row in of_panel if row.path == path],
                )
                for path in dict.fromkeys(row.path for row in of_panel)
            }
            lines(panel, shown)
            panel.set_xscale("log", base=2)
            panel.set_xlabel("KiB an object")
            panel.set_ylabel("GB/s")
            panel.set_ylim(bottom=0)
            panel.set_title(f"C={concurrency}")
        legend_above(figure, axes[0])
        return figure

    def notes(self, rows: Sequence[PathRow]) -> list[str]:
        """How much of a small object's time is the control plane's (paper, section 5.2)."""
        least_kib = min(row.object_kib for row in rows)
        return [
            f"{row.path}, {row.object_kib} KiB: {row.control_plane_ms / row.request_ms:.0%} of "
            f"{row.request_ms:.2f} ms are the control plane's"
            for row in rows
            if row.object_kib == least_kib and row.control_plane_ms is not None
        ]


def _measure(server: Server, object_kib: int, requests: int) -> Iterator[PathRow]:
    geometry = geometry_of(object_kib)
    keys = geometry.keys()
    with server.client(SHARED_MEMORY) as client:
        bucket = client.kv_bucket(f"objects-{object_kib}", geometry.layout(), create=True)
        shape = (OBJECTS, NUM_LAYERS, geometry.slice_bytes)
        objects = np.random.default_rng(object_kib).integers(0, 256, shape, np.uint8)
        bucket.put(keys, objects)
        for concurrency in CONCURRENCY:
            with closing(server.s3(concurrency)) as s3:
                for path, way in _ways(client, bucket, s3, keys, objects, concurrency).items():
                    yield _row(Served(server, client), path, way, object_kib, concurrency, requests)
    server.delete(bucket.name, keys)


def geometry_of(object_kib: int) -> Geometry:
    """Objects of that size as chunks of a few layers."""
    chunk_tokens = object_kib * KIB // (NUM_LAYERS * TOKEN_BYTES)
    return Geometry(chunk_tokens, OBJECTS, token_bytes=TOKEN_BYTES, num_layers=NUM_LAYERS)


Way = Callable[[int, int], str | None]  # by thread and turn; returns the request's id


def _ways(
    client: Client, bucket: KvBucket, s3: Any, keys: list[str], objects: Any, threads: int
) -> dict[str, Way]:
    """How a request goes by each path, each checked with a first one."""
    ways: dict[str, Way] = {TCP: partial(_get, s3, bucket.name, keys)}
    object_bytes = objects[0].nbytes
    for transport in transports():
        targets = [_target(client, transport, object_bytes) for _ in range(threads)]
        for forced, (how, papers) in PATHS.items():
            name = series(CARRIERS[transport], how, papers)
            way = partial(_fetch, bucket, keys, targets, forced)
            for thread, target in enumerate(targets):
                way(thread, thread)
                if not np.array_equal(target.array, objects[thread % OBJECTS].reshape(-1)):
                    raise SystemExit(f"{name}: other bytes were delivered")
            ways[name] = way
    return ways


def _target(client: Client, transport: str, length_bytes: int) -> SessionTarget:
    if transport == SHARED_MEMORY:
        return client.shared_memory_target(length_bytes)
    return client.fabric_target(length_bytes, transport=transport)


def _fetch(
    bucket: KvBucket,
    keys: list[str],
    targets: Sequence[SessionTarget],
    path: str,
    thread: int,
    turn: int,
) -> str | None:
    target, key = targets[thread], keys[turn % OBJECTS]
    transport = target.transport or SHARED_MEMORY
    with bucket.fetch(
        [key], delivery="chunkwise", path=path, target=target, transport=transport
    ) as delivery:
        delivery.report_explicitly()
        delivery.wait()
        return delivery.request_id


def _get(s3: Any, bucket: str, keys: list[str], thread: int, turn: int) -> None:
    s3.get_object(Bucket=bucket, Key=keys[turn % OBJECTS])["Body"].read()


def _row(
    store: Served, path: str, way: Way, object_kib: int, concurrency: int, requests: int
) -> PathRow:
    def several(thread: int) -> list[tuple[float, str | None]]:
        taken: list[tuple[float, str | None]] = []
        for turn in range(requests // concurrency):
            begun_s = time.monotonic()
            request_id = way(thread, turn * concurrency + thread)
            taken.append((time.monotonic() - begun_s, request_id))
        return taken

    begun_s = time.monotonic()
    with ThreadPoolExecutor(concurrency) as threads:
        taken = [one for each in threads.map(several, range(concurrency)) for one in each]
    wall_s = time.monotonic() - begun_s
    traced = [request_id for _, request_id in taken if request_id and concurrency == 1]
    return path_row(
        path, object_kib, concurrency, [s for s, _ in taken], wall_s, _phases_ms(store, traced)
    )


def path_row(
    path: str,
    object_kib: int,
    concurrency: int,
    times_s: Sequence[float],
    wall_s: float,
    phases_ms: Mapping[str, float],
) -> PathRow:
    """The row of one path; `phases_ms` is empty where they are not known."""
    ordered = sorted(times_s)
    return PathRow(
        path,
        object_kib,
        concurrency,
        len(ordered),
        statistics.median(ordered) * 1e3,
        ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e3,
        len(ordered) * object_kib * KIB / wall_s / 1e9,
        phases_ms.get("storage"),
        phases_ms.get("network"),
        phases_ms.get("control_plane"),
    )


def _phases_ms(store: Served, request_ids: Sequence[str]) -> dict[str, float]:
    """The median of each phase over the last requests."""
    traces = [store.trace(request_id) for request_id in request_ids[-QUICK_REQUESTS:]]
    phases: dict[str, list[float]] = {}
    for trace in traces:
        for phase in trace.phases:
            phases.setdefault(phase.name, []).append(phase.seconds * 1e3)
    return {name: statistics.median(of_name) for name, of_name in phases.items()}
