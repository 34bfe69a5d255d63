"""A working set larger than the memory that a cgroup leaves for it, read again and again.

The engine that divides extents between the page cache and the direct path stands beside the same
engine with everything in the page cache, whose least-recently-used order loses what it has just
read before it is read again.
"""

from __future__ import annotations

import mmap
import os
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
from benchmarks.pressed_reads import Reads
from benchmarks.store import opened_store
from benchmarks.warm import CACHED_BYTES
from objectcache_schemas.limits import GIB, MIB

PROCESS_BYTES = 80 * MIB  # the limit beyond its share of the working set: the process itself
SHARES = (0.25, 0.5, 0.75, 1.5)  # of the working set; the last has room for all of it
CONFIGURATIONS = {"budgeted": -1, "page cache alone": CACHED_BYTES}  # page_cache_bytes
TIMEOUT_S = 120.0


def measure_memory_pressure(bench: Bench) -> Iterator[Row]:
    """Rows for the rate and the hits of both configurations at each limit."""
    geometry = Geometry(16, bench.scale.pressed_chunks)
    missing = hierarchy()
    if isinstance(missing, str):
        print(f"memory pressure is left out: {missing}", file=sys.stderr)
        return
    with bench.place() as folder:
        _fill(folder / "store", geometry)
        for share in SHARES:
            found = {
                name: _read(folder / "store", geometry, share, page_cache_bytes, bench)
                for name, page_cache_bytes in CONFIGURATIONS.items()
            }
            yield from _rows(geometry, share, found)


def _fill(folder: Path, geometry: Geometry) -> None:
    keys = geometry.keys()
    memory = mmap.mmap(-1, geometry.payload_bytes)
    chunks = np.frombuffer(memory, np.uint8)
    shape = (geometry.chunk_count, geometry.num_layers, geometry.slice_bytes)
    fill_chunks(chunks.reshape(shape), geometry, keys)
    with opened_store(folder) as store:
        store.put(geometry, keys, memoryview(memory))


def _read(
    folder: Path, geometry: Geometry, share: float, page_cache_bytes: int, bench: Bench
) -> Reads:
    words = [
        *(sys.executable, "-m", "benchmarks.pressed_reads", str(folder), str(page_cache_bytes)),
        *(str(geometry.chunk_count), str(bench.scale.pressed_rounds)),
    ]
    drop_cached(folder)  # what others have cached costs the group nothing
    limit_bytes = PROCESS_BYTES + int(share * geometry.payload_bytes)
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


def _rows(geometry: Geometry, share: float, found: dict[str, Reads]) -> Iterator[Row]:
    alone = _later_rates(found["page cache alone"])
    for name, reads in found.items():
        details: dict[str, object] = {
            "limit_bytes": PROCESS_BYTES + int(share * geometry.payload_bytes),
            "reads": msgspec.to_builtins(reads),
        }
        held = f"{name}, memory for {share:.0%} of it"
        own_rates = _later_rates(reads)
        yield Row(
            group=_group(geometry),
            name=f"rate, {held}",
            unit="GiB/s",
            samples=own_rates,
            ratio=float(np.median(own_rates) / np.median(alone)),
            ratio_of=f"page cache alone, {share:.0%}",
            goal="",
            by_hand=_rate_by_hand(share),
            details=details,
        )
        hits = _later_hits(reads)
        yield Row(
            group=_group(geometry),
            name=f"found in memory, {held}",
            unit="%",
            samples=hits,
            ratio=float(np.median(hits)) / (100 * min(1.0, share)),
            ratio_of="what memory could hold",
            goal="",
            by_hand=f"{reads.budget_bytes / MIB:.0f} MiB by {reads.budget_source}",
        )


def _group(geometry: Geometry) -> str:
    return f"Memory pressure: {geometry.payload_bytes / MIB:.0f} MiB read again and again"


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
