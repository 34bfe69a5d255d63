"""Run in a process of its own, under a memory limit: read a store again and again.

`python -m benchmarks.pressed_reads FOLDER WAY CHUNKS ROUNDS` prints one JSON document. WAY is the
engine's page_cache_bytes, or `buffered` for plain reads of its files in a process of the same
imports, hence of about the same size.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import msgspec

from benchmarks.buffered_reads import BufferedReads
from benchmarks.measure import device_read_bytes, timed
from benchmarks.prefix import Geometry
from benchmarks.store import Store, opened_store
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.residency.memory_state import MemoryReader
from objectcache_storage_server.engines.local.upkeep import BUDGET_EVERY_S

BUFFERED = "buffered"
IN_FLIGHT_BYTES = 16 * MIB  # this process has no buffers for bodies


class Round(msgspec.Struct, frozen=True):
    """One pass over the whole store, its upkeep with it."""

    seconds: float
    delivered_bytes: int
    device_bytes: int  # read from the device meanwhile, by /proc/self/io
    counted_hit_bytes: int  # found in memory, by the engine's own count
    resident_bytes: int  # of extents on the page-cache path


class Reads(msgspec.Struct, frozen=True):
    """What a process saw and did."""

    budget_bytes: int
    budget_source: str
    memory_state: dict[str, object]
    rounds: list[Round]


def main() -> int:
    """Entry point."""
    folder, way, chunk_count, rounds = sys.argv[1:]
    geometry = Geometry(16, int(chunk_count))
    if way == BUFFERED:
        reads = _read_buffered(Path(folder), geometry, int(rounds))
    else:
        reads = _read_by_engine(Path(folder), int(way), geometry, int(rounds))
    sys.stdout.buffer.write(msgspec.json.encode(reads))
    return 0


def _read_by_engine(folder: Path, page_cache_bytes: int, geometry: Geometry, rounds: int) -> Reads:
    with opened_store(
        folder,
        page_cache_bytes=page_cache_bytes,
        server_in_flight_bytes_max=IN_FLIGHT_BYTES,
    ) as store:
        passes = [_pass(store, geometry, number) for number in range(rounds)]
        status = store.engine.status()
        return Reads(
            status.page_cache_budget_bytes,
            status.page_cache_budget_source,
            asdict(MemoryReader().read()),
            passes,
        )


def _pass(store: Store, geometry: Geometry, number: int) -> Round:
    """Deliver everything once.

    A round of upkeep is part of the time: what it prefetches was missed by the pass before, and is
    read from the same device. The engine's thread makes its own rounds besides.
    """
    engine = store.engine

    def work() -> None:
        # As if the budget's interval had gone by, which a pass is shorter than.
        engine.upkeep.round(time.monotonic() + (number + 1) * BUDGET_EVERY_S)
        store.deliver(geometry, geometry.keys(), None)

    hit_bytes = store.hit_bytes()
    seconds, device_bytes = _measured(work)
    return Round(
        seconds,
        geometry.payload_bytes,
        device_bytes,
        store.hit_bytes() - hit_bytes,
        engine.holdings.resident_bytes,
    )


def _read_buffered(folder: Path, geometry: Geometry, rounds: int) -> Reads:
    with opened_store(folder) as store:
        runs, threads = store.layer_runs(), store.reader_threads
    with ExitStack() as stack:
        reads = BufferedReads(runs, threads, stack)
        passes: list[Round] = []
        for _ in range(rounds):
            seconds, device_bytes = _measured(reads.read)
            passes.append(Round(seconds, geometry.payload_bytes, device_bytes, 0, 0))
    return Reads(0, "the kernel", asdict(MemoryReader().read()), passes)


def _measured(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a call, and the bytes that the device read for it."""
    before_bytes = device_read_bytes()
    seconds = timed(work)
    return seconds, device_read_bytes() - before_bytes


if __name__ == "__main__":
    sys.exit(main())
