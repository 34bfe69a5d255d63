"""A working set larger than the memory that a cgroup leaves for it, read again and again.

The engine that divides extents between the page cache and the direct path is to lose in proportion
to what does not fit. Beside it stand plain buffered reads of the same bytes in the same order by as
many threads, for which the kernel's least-recently-used order loses what it has just read before it
is read again; and the same engine with everything on the page-cache path, and with nothing.
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.bench import Bench
from benchmarks.measure import COPY_BYTES_PER_S_PER_THREAD, DEVICE_READ_BYTES_PER_S, Row, rates
from benchmarks.memory_group import hierarchy, memory_group
from benchmarks.prefix import Geometry, fill_chunks
from benchmarks.pressed_reads import BUFFERED, Reads
from benchmarks.store import opened_store
from benchmarks.warm import CACHED_BYTES
from objectcache_schemas.limits import GIB, MIB

PROCESS_BYTES = 80 * MIB  # the limit beyond its share of the working set: the process itself
BUDGETED, ALL_CACHED = "budgeted", "all of it on the page-cache path"
DIRECT_ALONE, PEER = "the direct path alone", "buffered reads"
WAYS = {BUDGETED: "-1", ALL_CACHED: str(CACHED_BYTES), DIRECT_ALONE: "0", PEER: BUFFERED}
IN_PROPORTION = 0.7  # of the rate that only what does not fit would cost
TIMEOUT_S = 120.0


def measure_memory_pressure(bench: Bench) -> Iterator[Row]:
    """Rows for the rates of all ways to read, and for hits, at each limit."""
    geometry = Geometry(16, bench.scale.pressed_chunks)
    missing = hierarchy()
    if isinstance(missing, str):
        print(f"memory pressure is left out: {missing}", file=sys.stderr)
        return
    with bench.place() as folder:
        _fill(folder / "store", geometry)
        store = folder / "store"
        shares = bench.scale.pressed_shares
        # With room for everything this rate is the warm one.
        warm = _read(store, geometry, max(shares), WAYS[ALL_CACHED], bench)
        for share in shares:
            found = {name: _read(store, geometry, share, way, bench) for name, way in WAYS.items()}
            yield from _rows(geometry, share, found, _bytes_per_s(warm))


def _fill(folder: Path, geometry: Geometry) -> None:
    keys = geometry.keys()
    memory = mmap.mmap(-1, geometry.payload_bytes)
    chunks = np.frombuffer(memory, np.uint8)
    shape = (geometry.chunk_count, geometry.num_layers, geometry.slice_bytes)
    fill_chunks(chunks.reshape(shape), geometry, keys)
    with opened_store(folder) as store:
        store.put(geometry, keys, memoryview(memory))


def _read(folder: Path, geometry: Geometry, share: float, way: str, bench: Bench) -> Reads:
    words = [
        *(sys.executable, "-m", "benchmarks.pressed_reads", str(folder), way),
        *(str(geometry.chunk_count), str(bench.scale.pressed_rounds)),
    ]
    drop_cached(folder)  # what others have cached costs the group nothing
    limit_bytes = _limit_bytes(geometry, share)
    with memory_group(limit_bytes) as group:
        done = subprocess.run(
            group.command(words), capture_output=True, timeout=TIMEOUT_S, check=False
        )
    if done.returncode:
        raise SystemExit(f"reading under {limit_bytes} bytes failed: {done.stderr.decode()}")
    return msgspec.json.decode(done.stdout, type=Reads)


def drop_cached(folder: Path) -> None:
    """Let the page cache forget the data files of a store that is closed."""
    for file in (folder / "data").iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def in_proportion_s(
    resident_bytes: float, rest_bytes: float, warm_bytes_per_s: float, direct_bytes_per_s: float
) -> float:
    """Seconds of a round that loses only what does not fit: the rest at the device's rate."""
    return resident_bytes / warm_bytes_per_s + rest_bytes / direct_bytes_per_s


def _rows(
    geometry: Geometry, share: float, found: dict[str, Reads], warm_bytes_per_s: float
) -> Iterator[Row]:
    yield _in_proportion_row(geometry, share, found, warm_bytes_per_s)
    for name, reads in found.items():
        ratio = _bytes_per_s(reads) / _bytes_per_s(found[PEER])
        shown = name if name == PEER else f"{name}, against {PEER}"
        yield _rate_row(geometry, share, reads, shown, ratio, f"{PEER}, {share:.0%}")
    for name in (BUDGETED, PEER):
        yield _hits_row(geometry, share, found[name], name)


def _in_proportion_row(
    geometry: Geometry, share: float, found: dict[str, Reads], warm_bytes_per_s: float
) -> Row:
    reads = found[BUDGETED]
    resident_bytes = statistics.median(each.resident_bytes for each in reads.rounds[1:])
    resident_bytes = min(resident_bytes, geometry.payload_bytes)
    rest_bytes = geometry.payload_bytes - resident_bytes
    direct_bytes_per_s = _bytes_per_s(found[DIRECT_ALONE])
    fair_s = in_proportion_s(resident_bytes, rest_bytes, warm_bytes_per_s, direct_bytes_per_s)
    ratio = fair_s * _bytes_per_s(reads) / geometry.payload_bytes
    held = f"{resident_bytes / MIB:.0f} MiB resident at the warm rate"
    rest = f"{rest_bytes / MIB:.0f} MiB at the direct rate"
    name, goal = f"{BUDGETED}, in proportion to what does not fit", f"at least {IN_PROPORTION}"
    return _rate_row(geometry, share, reads, name, ratio, f"{held}, {rest}", goal)


def _rate_row(
    geometry: Geometry,
    share: float,
    reads: Reads,
    name: str,
    ratio: float,
    ratio_of: str,
    goal: str = "",
) -> Row:
    return Row(
        group=_group(geometry),
        name=f"memory for {share:.0%}: {name}",
        unit="GiB/s",
        samples=_later_rates(reads),
        ratio=ratio,
        ratio_of=ratio_of,
        goal=goal,
        by_hand=_rate_by_hand(share),
        details={
            "limit_bytes": _limit_bytes(geometry, share),
            "reads": msgspec.to_builtins(reads),
        },
    )


def _hits_row(geometry: Geometry, share: float, reads: Reads, name: str) -> Row:
    hits = _later_hits(reads)
    budget = f", a budget of {reads.budget_bytes / MIB:.0f} MiB" if reads.budget_bytes else ""
    return Row(
        group=_group(geometry),
        name=f"memory for {share:.0%}: {name}, found in memory",
        unit="%",
        samples=hits,
        ratio=float(np.median(hits)) / (100 * min(1.0, share)),
        ratio_of="what memory could hold",
        goal="",
        by_hand=f"by {reads.budget_source}{budget}",
    )


def _group(geometry: Geometry) -> str:
    return f"Memory pressure: {geometry.payload_bytes / MIB:.0f} MiB read again and again"


def _limit_bytes(geometry: Geometry, share: float) -> int:
    return PROCESS_BYTES + int(share * geometry.payload_bytes)


def _bytes_per_s(reads: Reads) -> float:
    return GIB * statistics.median(_later_rates(reads))


def _later_rates(reads: Reads) -> tuple[float, ...]:
    """GiB/s of all rounds but the first, which finds nothing in memory."""
    later = reads.rounds[1:]
    return rates([each.seconds for each in later], later[0].delivered_bytes)


def _later_hits(reads: Reads) -> tuple[float, ...]:
    """Percent of the bytes that needed no device."""
    return tuple(
        100 * max(0.0, 1 - each.device_bytes / each.delivered_bytes) for each in reads.rounds[1:]
    )


def _rate_by_hand(share: float) -> str:
    held = min(1.0, share)
    seconds = held / (2 * COPY_BYTES_PER_S_PER_THREAD) + (1 - held) / DEVICE_READ_BYTES_PER_S
    return f"hits copied, the rest off the device: {1 / seconds / GIB:.1f} GiB/s"
