"""A working set larger than the memory that a cgroup leaves for it, read again and again.

The engine that divides extents between the page cache and the direct path is to lose in proportion
to what does not fit. Beside it stand plain buffered reads of the same bytes in the same order by as
many threads, for which the kernel's least-recently-used order loses what it has just read before it
is read again; and the same engine with nothing on the page-cache path.

Each has a store, a process and a cgroup of its own, so that no page which one has read is found, or
paid for, by another. All of them stay up while a share of memory is measured, and read once a
round, by turns: what the device gives moves from one second to the next, so it is read past every
cache before and after each of them (`pressure_rows.py`).
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row, Samples
from benchmarks.basis.prefix import Geometry, fill_chunks
from benchmarks.basis.store import Store, data_file, opened_store
from benchmarks.deliveries.cold import InOrder
from benchmarks.deliveries.warm import CACHED_BYTES
from benchmarks.machine.device import device_reads
from benchmarks.memory_pressure.memory_group import hierarchy
from benchmarks.memory_pressure.pressed_process import PressedProcess, pressed_process
from benchmarks.memory_pressure.pressed_reads import BUFFERED
from benchmarks.memory_pressure.pressure_rows import (
    BUDGETED,
    DIRECT_ALONE,
    PEER,
    Cell,
    Share,
    pressure_rows,
)
from objectcache_schemas.limits import MIB

PROCESS_BYTES = 80 * MIB  # the limit beyond its share of the working set: the process itself
WAYS = {BUDGETED: "-1", PEER: BUFFERED, DIRECT_ALONE: "0"}
WARM, DEVICE = "warm", "device"
WARM_SHARE = 2.0  # of the working set: memory for all of it, and more
WARM_PASSES = 2  # of a round; the better one counts, as with the device
PASSES_MAX = 40  # until it is warm
WARM_UP_PASSES = 8  # nothing is in memory at first, and upkeep brings back what was missed


def measure_memory_pressure(bench: Bench) -> Iterator[Row]:
    """Rows for each share of the working set that memory has room for."""
    geometry = Geometry(16, bench.scale.pressed_chunks)
    missing = hierarchy()
    if isinstance(missing, str):
        print(f"memory pressure is left out: {missing}", file=sys.stderr)
        return
    with bench.place() as folder, ExitStack() as stack:
        payload = mmap.mmap(-1, geometry.payload_bytes)
        _fill(folder, geometry, payload)
        store = stack.enter_context(opened_store(folder / DEVICE, page_cache_bytes=0))
        device = _Device(store, memoryview(payload))
        warm = _started(stack, folder, geometry, WARM, str(CACHED_BYTES), WARM_SHARE)
        _wait_until_warm(warm)
        for share in bench.scale.pressed_shares:
            yield from _rows_of(bench, folder, geometry, share, device, warm)


def _rows_of(
    bench: Bench,
    folder: Path,
    geometry: Geometry,
    share: float,
    device: _Device,
    warm: PressedProcess,
) -> Iterator[Row]:
    with ExitStack() as stack:
        processes = {
            name: _started(stack, folder, geometry, name, way, share) for name, way in WAYS.items()
        }
        cells: list[Cell] = []
        for number in range(bench.scale.pressed_rounds):
            cells += _round(processes, device, warm, number)
        found = {name: process.opened for name, process in processes.items()}
    limit_bytes = _limit_bytes(geometry, share)
    yield from pressure_rows(Share(share, geometry.payload_bytes, limit_bytes, found), cells)


def _round(
    processes: dict[str, PressedProcess], device: _Device, warm: PressedProcess, number: int
) -> Iterator[Cell]:
    """Each once, another one first each time, with the device before and after it."""
    warm_s = min(warm.read().seconds for _ in range(WARM_PASSES))
    first = number % len(processes)
    names = [*processes][first:] + [*processes][:first]
    before = device.bytes_per_s()
    for name in names:
        reads = processes[name].read()
        after = device.bytes_per_s()
        yield Cell(name, reads, warm_s, before, after)
        before = after


def _started(
    stack: ExitStack, folder: Path, geometry: Geometry, name: str, way: str, share: float
) -> PressedProcess:
    """A process that has read its store a few times already."""
    _drop_cached(folder / name)  # what others have cached costs the group nothing
    process = stack.enter_context(
        pressed_process(folder / name, name, way, geometry, _limit_bytes(geometry, share))
    )
    for _ in range(WARM_UP_PASSES):
        process.read()
    return process


def _wait_until_warm(warm: PressedProcess) -> None:
    """Read until all of it is found in memory. Exits where that does not come to be."""
    if all(warm.read().device_bytes for _ in range(PASSES_MAX)):
        raise SystemExit("with room for everything, something was still read from the device")


class _Device:
    """The device's own rate for as many bytes in order, past the page cache."""

    def __init__(self, store: Store, memory: memoryview) -> None:
        self._limit = device_reads(data_file(store.folder, 0), len(memory), is_quick=True)
        self._in_order = InOrder(store, memory)
        self._length_bytes = len(memory)

    def bytes_per_s(self) -> float:
        """The best of fio, of two threads of our own, and of the direct path alone, once each."""
        samples = Samples()
        self._limit.take(samples)
        self._in_order.take(samples)
        return self._length_bytes / min(map(samples.median_s, samples.seconds))


def _fill(folder: Path, geometry: Geometry, payload: mmap.mmap) -> None:
    """A store with the same prefix for each that reads."""
    keys = geometry.keys()
    chunks = np.frombuffer(payload, np.uint8)
    shape = (geometry.chunk_count, geometry.num_layers, geometry.slice_bytes)
    fill_chunks(chunks.reshape(shape), geometry, keys)
    for name in (DEVICE, WARM, *WAYS):
        with opened_store(folder / name) as store:
            store.put(geometry, keys, memoryview(payload))


def _drop_cached(folder: Path) -> None:
    """Let the page cache forget the data files of a store that is closed."""
    for file in (folder / "data").iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _limit_bytes(geometry: Geometry, share: float) -> int:
    return PROCESS_BYTES + int(share * geometry.payload_bytes)
