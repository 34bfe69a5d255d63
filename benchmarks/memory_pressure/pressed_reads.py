"""Run in a process of its own, under a memory limit: read a store again and again.

`python -m benchmarks.memory_pressure.pressed_reads FOLDER WAY CHUNKS` prints one line of JSON once
it is ready (`Opened`), and one for every line that it is sent, after another pass over the whole
store (`Round`). WAY is the engine's page_cache_bytes, or `buffered` for plain reads of its files in
a process of the same imports, hence of about the same size.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import msgspec

from benchmarks.basis.measure import device_read_bytes, timed
from benchmarks.basis.prefix import Geometry
from benchmarks.basis.store import Store, opened_store
from benchmarks.memory_pressure.buffered_reads import BufferedReads
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.residency.memory_state import MemoryReader
from objectcache_storage_server.engines.local.upkeep.upkeep_thread import BUDGET_EVERY_S

BUFFERED = "buffered"
IN_FLIGHT_BYTES = 16 * MIB  # this process has no buffers for bodies


class Round(msgspec.Struct, frozen=True):
    """One pass over the whole store, its upkeep with it."""

    seconds: float
    delivered_bytes: int
    device_bytes: int  # read from the device meanwhile, by /proc/self/io
    counted_hit_bytes: int  # found in memory, by the engine's own count
    resident_bytes: int  # of extents on the page-cache path


class Opened(msgspec.Struct, frozen=True):
    """What the process sees of its memory once the store is open."""

    budget_bytes: int
    budget_source: str
    memory_state: dict[str, object]


def main() -> int:
    """Entry point."""
    folder, way, chunk_count = sys.argv[1:]
    geometry = Geometry(16, int(chunk_count))
    with ExitStack() as stack:
        if way == BUFFERED:
            opened, read = _buffered(Path(folder), geometry, stack)
        else:
            opened, read = _by_engine(Path(folder), int(way), geometry, stack)
        _say(opened)
        for _ in sys.stdin.buffer:
            _say(read())
    return 0


def _say(said: Opened | Round) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(said) + b"\n")
    sys.stdout.buffer.flush()


Read = Callable[[], Round]


def _by_engine(
    folder: Path, page_cache_bytes: int, geometry: Geometry, stack: ExitStack
) -> tuple[Opened, Read]:
    store = stack.enter_context(
        opened_store(
            folder,
            page_cache_bytes=page_cache_bytes,
            server_in_flight_bytes_max=IN_FLIGHT_BYTES,
        )
    )
    status = store.engine.status()
    opened = Opened(
        status.page_cache_budget_bytes, status.page_cache_budget_source, _memory_state()
    )
    numbers = itertools.count(1)
    return opened, lambda: _pass(store, geometry, next(numbers))


def _pass(store: Store, geometry: Geometry, number: int) -> Round:
    """Deliver everything once.

    A round of upkeep is part of the time: what it prefetches was missed by the pass before, and is
    read from the same device. The engine's thread makes its own rounds besides.
    """
    engine = store.engine

    def work() -> None:
        # As if the budget's interval had gone by, which a pass is shorter than.
        engine.upkeep.round(time.monotonic() + number * BUDGET_EVERY_S)
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


def _buffered(folder: Path, geometry: Geometry, stack: ExitStack) -> tuple[Opened, Read]:
    with opened_store(folder) as store:
        runs, threads = store.layer_runs(), store.reader_threads
    reads = BufferedReads(runs, threads, stack)

    def read() -> Round:
        seconds, device_bytes = _measured(reads.read)
        return Round(seconds, geometry.payload_bytes, device_bytes, 0, 0)

    return Opened(0, "the kernel", _memory_state()), read


def _memory_state() -> dict[str, object]:
    return asdict(MemoryReader().read())


def _measured(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds of a call, and the bytes that the device read for it."""
    before_bytes = device_read_bytes()
    seconds = timed(work)
    return seconds, device_read_bytes() - before_bytes


if __name__ == "__main__":
    sys.exit(main())
