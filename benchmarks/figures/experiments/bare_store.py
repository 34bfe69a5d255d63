"""Figure 8: the bare store, one object a read off the device, without gateway, socket or client.

Beside it the device's own random reads of as many bytes by fio, as many in flight.
"""

from __future__ import annotations

import json
import mmap
import random
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from benchmarks.basis.measure import timed
from benchmarks.basis.prefix import Geometry, fill_chunks
from benchmarks.basis.store import BUCKET, Store, block_aligned, data_file
from benchmarks.deliveries.cold import DIRECT
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import legend_above, lines, panels
from benchmarks.machine.device import has_fio
from objectcache_schemas.limits import KIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OBJECT_KIB = (64, 256, 1024, 4096)
QUICK_OBJECT_KIB = (64, 4096)
IN_FLIGHT = (8, 32)
THREAD_IN_FLIGHT = 8  # of fio, as in the paper: 32 are four threads with eight each
STORE_BYTES, QUICK_STORE_BYTES = 512 * MIB, 32 * MIB
READ_BYTES, QUICK_READ_BYTES = 256 * MIB, 16 * MIB  # of one sample
REPEATS, QUICK_REPEATS = 5, 1
ENGINE = "the engine alone, an open and a read an object"
DEVICE = "the device alone, random reads by fio"


@dataclass(frozen=True, slots=True)
class BareRow:
    """One way to read objects of one size, so many at once; the median of `samples`."""

    path: str
    object_kib: int
    in_flight: int
    samples: int
    gbytes_per_s: float
    least_gbytes_per_s: float
    most_gbytes_per_s: float
    reads_per_s: float


class BareStoreExperiment(Experiment[BareRow]):
    """Figure 8, of this machine's device."""

    name: ClassVar[str] = "bare_store"
    title: ClassVar[str] = "Figure 8: the bare store, cold, against object size"
    conditions: ClassVar[str] = (
        "Nothing is scaled. Bytes go from one virtual disk into memory of the process with "
        "O_DIRECT, over no network: the paper's store over RDMA and TCP is not shown."
    )

    def run(self, context: Context) -> list[BareRow]:
        rows: list[BareRow] = []
        for object_kib in QUICK_OBJECT_KIB if context.is_quick else OBJECT_KIB:
            context.say(f"{object_kib} KiB")
            with context.bench.store(page_cache_bytes=DIRECT) as store:
                keys = _put(store, object_kib, context.is_quick)
                rows += _measure(store, keys, object_kib, context.is_quick)
        return rows

    def plot(self, rows: Sequence[BareRow]) -> Figure:
        figure, axes = panels(1, len(IN_FLIGHT))
        for panel, in_flight in zip(axes, IN_FLIGHT, strict=True):
            mine = [row for row in rows if row.in_flight == in_flight]
            shown = {
                path: (
                    [float(row.object_kib) for row in mine if row.path == path],
                    [row.gbytes_per_s for row in mine if row.path == path],
                )
                for path in dict.fromkeys(row.path for row in mine)
            }
            lines(panel, shown)
            panel.set_xscale("log", base=2)
            panel.set_xlabel("KiB an object")
            panel.set_ylabel("GB/s")
            panel.set_ylim(bottom=0)
            panel.set_title(f"C={in_flight}")
        legend_above(figure, axes[0])
        return figure

    def notes(self, rows: Sequence[BareRow]) -> list[str]:
        """The engine, of the device; and what the paper says of its own."""
        by_place = {(row.path, row.object_kib, row.in_flight): row for row in rows}
        ratios = [
            f"{object_kib} KiB, C={in_flight}: "
            f"{row.gbytes_per_s / by_place[DEVICE, object_kib, in_flight].gbytes_per_s:.2f}"
            for (path, object_kib, in_flight), row in by_place.items()
            if path == ENGINE and (DEVICE, object_kib, in_flight) in by_place
        ]
        return [
            f"the engine, of the device's random reads: {'; '.join(ratios) or 'fio is missing'}",
            "paper, four SSDs: local reads exceed 12.5 GB/s from 256 KiB on at C=32, and over RDMA "
            "come near it from 1 MiB on at C=8",
        ]


def objects_of(object_kib: int, is_quick: bool) -> Geometry:
    """Objects of that size: chunks of one layer, so that each is one run on the device."""
    store_bytes = QUICK_STORE_BYTES if is_quick else STORE_BYTES
    object_bytes = object_kib * KIB
    return Geometry(1, store_bytes // object_bytes, token_bytes=object_bytes, num_layers=1)


def _put(store: Store, object_kib: int, is_quick: bool) -> list[str]:
    geometry = objects_of(object_kib, is_quick)
    keys = geometry.keys()
    payload = mmap.mmap(-1, geometry.payload_bytes)
    shape = (geometry.chunk_count, 1, geometry.slice_bytes)
    fill_chunks(np.frombuffer(payload, np.uint8).reshape(shape), geometry, keys)
    store.put(geometry, keys, memoryview(payload))
    store.check(geometry, keys, memoryview(payload))
    return keys


def _measure(
    store: Store, keys: Sequence[str], object_kib: int, is_quick: bool
) -> Iterator[BareRow]:
    """Both ways in turn, so that a slow spell of the device hits each of them."""
    read_bytes = QUICK_READ_BYTES if is_quick else READ_BYTES
    count = min(len(keys), read_bytes // (object_kib * KIB))
    shuffled = random.Random(object_kib).sample(keys, count)
    for in_flight in IN_FLIGHT:
        ways: dict[str, Callable[[], float]] = {
            ENGINE: partial(_engine_bytes_per_s, store, shuffled, object_kib * KIB, in_flight)
        }
        if has_fio():
            data = data_file(store.folder, 0), len(keys) * object_kib * KIB
            ways[DEVICE] = partial(_fio_bytes_per_s, *data, object_kib, in_flight)
        rates: dict[str, list[float]] = {path: [] for path in ways}
        for _ in range(QUICK_REPEATS if is_quick else REPEATS):
            for path, way in ways.items():
                rates[path].append(way())
        for path, of_path in rates.items():
            yield bare_row(path, object_kib, in_flight, of_path)


def bare_row(path: str, object_kib: int, in_flight: int, bytes_per_s: Sequence[float]) -> BareRow:
    """The row of one path."""
    median = statistics.median(bytes_per_s)
    return BareRow(
        path,
        object_kib,
        in_flight,
        len(bytes_per_s),
        median / 1e9,
        min(bytes_per_s) / 1e9,
        max(bytes_per_s) / 1e9,
        median / (object_kib * KIB),
    )


def _engine_bytes_per_s(
    store: Store, keys: Sequence[str], object_bytes: int, in_flight: int
) -> float:
    memories = [block_aligned(object_bytes) for _ in range(in_flight)]

    def read_share(number: int) -> None:
        for key in keys[number::in_flight]:
            with store.engine.open_many(BUCKET, [key]) as opened:
                opened.read_into(0, 0, memories[number])

    with ThreadPoolExecutor(in_flight) as threads:
        seconds = timed(lambda: list(threads.map(read_share, range(in_flight))))
    return len(keys) * object_bytes / seconds


def _fio_bytes_per_s(file: Path, length_bytes: int, object_kib: int, in_flight: int) -> float:
    jobs = in_flight // THREAD_IN_FLIGHT
    command = [
        *("fio", "--name=bare", f"--filename={file}", f"--size={length_bytes}", "--readonly"),
        *("--rw=randread", f"--bs={object_kib}k", f"--iodepth={THREAD_IN_FLIGHT}"),
        *(f"--numjobs={jobs}", f"--io_size={min(length_bytes, READ_BYTES) // jobs}"),
        *("--direct=1", "--ioengine=io_uring", "--group_reporting", "--output-format=json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr or done.stdout}")
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return float(job["read"]["bw_bytes"])
