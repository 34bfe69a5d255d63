"""`python -m benchmarks`: measure, print a table, write a JSON file."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row
from benchmarks.basis.report import commit, machine, results_tables, write_json, write_markdown
from benchmarks.basis.scale import FULL, QUICK, scale_that_fits
from benchmarks.deliveries.cold import measure_cold
from benchmarks.deliveries.far_store import measure_far_store
from benchmarks.deliveries.first_layer import measure_first_layer
from benchmarks.deliveries.first_read import measure_first_reads
from benchmarks.deliveries.nixl import measure_nixl
from benchmarks.deliveries.puts import measure_puts
from benchmarks.deliveries.small_chunks import measure_small_chunks
from benchmarks.deliveries.stages import measure_stages
from benchmarks.deliveries.warm import measure_warm
from benchmarks.dual_path.questions import measure_dual_path
from benchmarks.encodings.codecs import measure_codecs
from benchmarks.encodings.decode_workers import measure_decode_workers
from benchmarks.encodings.encoded_puts import measure_encoded_puts
from benchmarks.memory_pressure.rounds import measure_memory_pressure
from benchmarks.s3.requests import measure_s3
from benchmarks.server_costs.dispatch_service import measure_dispatch_service
from benchmarks.server_costs.dispatching import measure_dispatching
from benchmarks.server_costs.million_objects import measure_million_objects
from benchmarks.server_costs.planning import measure_planning
from benchmarks.server_costs.scheduling import measure_scheduling
from benchmarks.server_costs.server_memory import measure_server_memory

TABLE_COLUMNS = 160
QUESTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "cold": measure_cold,
    "warm": measure_warm,
    "first-read": measure_first_reads,
    "first-layer": measure_first_layer,
    "stages": measure_stages,
    "server-memory": measure_server_memory,
    "far-store": measure_far_store,
    "planning": measure_planning,
    "scheduling": measure_scheduling,
    "dispatching": measure_dispatching,
    "dispatch-service": measure_dispatch_service,
    "codecs": measure_codecs,
    "decode-workers": measure_decode_workers,
    "puts": measure_puts,
    "encoded-puts": measure_encoded_puts,
    "memory-pressure": measure_memory_pressure,
    "small-chunks": measure_small_chunks,
    "many-objects": measure_million_objects,
    "nixl": measure_nixl,
    "dual-path": measure_dual_path,
    "s3": measure_s3,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; exits as argparse does."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small volume, for a first look")
    parser.add_argument(
        "--only",
        action="append",
        choices=QUESTIONS,
        help="measure this alone; may be repeated",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(),
        help="directory on the device to measure; default: the current one. What is made in it is "
        "removed",
    )
    parser.add_argument("--results", type=Path, default=Path("bench-results"))
    return parser.parse_args(arguments)


def measure(bench: Bench, questions: list[str]) -> Iterator[Row]:
    """All rows, in the table's order."""
    for name, question in QUESTIONS.items():
        if name in questions:
            yield from question(bench)


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0 whatever the figures are."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    available_bytes = psutil.virtual_memory().available
    scale = scale_that_fits(QUICK if options.quick else FULL, available_bytes)
    run: dict[str, object] = {"commit": commit(), "machine": machine(), "scale": scale}
    console = Console(stderr=True)
    rows: list[Row] = []
    options.data_dir.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="objectcache-bench-", dir=options.data_dir) as folder,
        console.status("measuring") as status,
    ):
        bench = Bench(Path(folder).absolute(), scale)
        for row in measure(bench, options.only or list(QUESTIONS)):
            rows.append(row)
            status.update(f"measured: {row.group}, {row.name}")
    Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS).print(*results_tables(rows))
    if options.quick:
        print("A quick run: its volumes fit into caches, and the goals are those of a full run.")
    print(f"commit {run['commit']}, {run['machine']}")
    print(f"every sample: {write_json(options.results, run, rows)}")
    print(f"the tables: {write_markdown(options.results, run, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
