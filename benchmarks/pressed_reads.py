"""Run in a process of its own, under a memory limit: read a store again and again.

`python -m benchmarks.pressed_reads FOLDER PAGE_CACHE_BYTES CHUNKS ROUNDS` prints one JSON document.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from benchmarks.prefix import Geometry
from benchmarks.store import Store, opened_store
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.residency.memory_state import MemoryReader
from objectcache_storage_server.engines.local.upkeep import BUDGET_EVERY_S

IN_FLIGHT_BYTES = 16 * MIB  # this process has no buffers for bodies


class Round(msgspec.Struct, frozen=True):
    """One pass over the whole store."""

    seconds: float
    delivered_bytes: int
    device_bytes: int  # read from the device for it, by /proc/self/io
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
    folder, page_cache_bytes, chunk_count, rounds = sys.argv[1:]
    geometry = Geometry(16, int(chunk_count))
    with opened_store(
        Path(folder),
        page_cache_bytes=int(page_cache_bytes),
        server_in_flight_bytes_max=IN_FLIGHT_BYTES,
    ) as store:
        passes = [_pass(store, geometry) for _ in range(int(rounds))]
        status = store.engine.status()
        reads = Reads(
            status.page_cache_budget_bytes,
            status.page_cache_budget_source,
            asdict(MemoryReader().read()),
            passes,
        )
    sys.stdout.buffer.write(msgspec.json.encode(reads))
    return 0


def _pass(store: Store, geometry: Geometry) -> Round:
    engine = store.engine
    # As if the budget's interval had gone by, which a pass is shorter than.
    engine.upkeep.round(time.monotonic() + BUDGET_EVERY_S)
    device_bytes, hit_bytes = _device_bytes(), _hit_bytes(store)
    begin_s = time.perf_counter()
    store.deliver(geometry, geometry.keys(), None)
    seconds = time.perf_counter() - begin_s
    return Round(
        seconds,
        geometry.payload_bytes,
        _device_bytes() - device_bytes,
        _hit_bytes(store) - hit_bytes,
        engine.holdings.resident_bytes,
    )


def _hit_bytes(store: Store) -> int:
    return sum(path.hit_bytes for path in store.engine.status().paths)


def _device_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise LookupError("/proc/self/io has no read_bytes")


if __name__ == "__main__":
    sys.exit(main())
