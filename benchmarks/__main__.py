"""`python -m benchmarks`: measure everything, print a table, write a JSON file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.deliveries import measure_deliveries
from benchmarks.first_layer import measure_first_layer
from benchmarks.measure import Row
from benchmarks.planning import measure_planning
from benchmarks.prefix import Geometry
from benchmarks.puts import measure_puts
from benchmarks.report import commit, machine, results_tables, write_json
from benchmarks.server import Server, running_server
from benchmarks.server_memory import measure_server_memory
from objectcache_schemas.limits import MIB

TABLE_COLUMNS = 160
# Page cache of three prefixes, the target, two landing places of the copy limit, one of the stream.
PAYLOADS_IN_MEMORY = 10


@dataclass(frozen=True, slots=True)
class Volume:
    """How much is measured."""

    payload_bytes: int
    first_layer_chunks: int
    put_bytes: int
    repeats: int


FULL = Volume(896 * MIB, first_layer_chunks=64, put_bytes=256 * MIB, repeats=9)
QUICK = Volume(64 * MIB, first_layer_chunks=16, put_bytes=32 * MIB, repeats=2)


def volume_that_fits(volume: Volume, available_bytes: int) -> Volume:
    """The volume with its payload cut to what memory can hold, in steps of G=256 chunks."""
    step_bytes = Geometry(256, 0).chunk_bytes
    room_bytes = available_bytes // PAYLOADS_IN_MEMORY // step_bytes * step_bytes
    payload_bytes = max(step_bytes, min(volume.payload_bytes, room_bytes))
    return Volume(payload_bytes, volume.first_layer_chunks, volume.put_bytes, volume.repeats)


def measure(server: Server, volume: Volume) -> Iterator[Row]:
    """All rows, in the table's order."""
    geometries = [Geometry(tokens, volume.payload_bytes) for tokens in (16, 64, 256)]
    yield from measure_deliveries(server, geometries, volume.repeats)
    yield from measure_first_layer(server, volume.first_layer_chunks, volume.repeats)
    yield from measure_server_memory(server, geometries[0], volume.repeats)
    yield from measure_planning(volume.repeats)
    yield from measure_puts(server, Geometry(16, volume.put_bytes), volume.repeats)


def main() -> int:
    """Entry point; 0 whatever the figures are."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small volume, for a first look")
    parser.add_argument(
        "--data-parent", type=Path, help="directory on the device to measure; default: temporary"
    )
    parser.add_argument("--results", type=Path, default=Path("bench-results"))
    options = parser.parse_args()
    available_bytes = psutil.virtual_memory().available
    volume = volume_that_fits(QUICK if options.quick else FULL, available_bytes)
    run: dict[str, object] = {"commit": commit(), "machine": machine(), "volume": volume}
    console = Console(stderr=True)
    rows: list[Row] = []
    with running_server(options.data_parent) as server, console.status("measuring") as status:
        for row in measure(server, volume):
            rows.append(row)
            status.update(f"measured: {row.group}, {row.name}")
    Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS).print(*results_tables(rows))
    if options.quick:
        print("A quick run: its volumes fit into caches, and the goals are those of a full run.")
    print(f"commit {run['commit']}, {run['machine']}")
    print(f"every sample: {write_json(options.results, run, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
