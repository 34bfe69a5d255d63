"""`python -m benchmarks.dual_path`: what other nodes' storage links give to a prefill node.

Network namespaces with links that the kernel bounds, a real server, relays on other nodes, and the
reference engine that prefills. Needs root and iproute2. Every byte is compared, and every link's
count with the bytes delivered over it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from benchmarks.basis import scale
from benchmarks.basis.bench import Bench
from benchmarks.basis.report import commit, machine, results_tables, write_json, write_markdown
from benchmarks.dual_path.questions import PARTS, TRANSPORTS, measure_parts
from benchmarks.figures.experiment import NotPossible

TABLE_COLUMNS = 160
NOT_POSSIBLE = 3  # the exit status where this machine has no namespaces


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 whatever the figures are."""
    parser = argparse.ArgumentParser("python -m benchmarks.dual_path", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small volume, for a first look")
    parser.add_argument("--only", action="append", choices=PARTS, help="these rows alone")
    parser.add_argument("--transport", action="append", choices=TRANSPORTS, help="this alone")
    parser.add_argument("--results", type=Path, default=Path("bench-results"))
    asked = parser.parse_args(arguments)
    run: dict[str, object] = {"commit": commit(), "machine": machine()}
    console = Console(stderr=True)
    rows = []
    with (
        _ended_by_exceptions(),
        tempfile.TemporaryDirectory(prefix="objectcache-bench-") as folder,
    ):
        bench = Bench(Path(folder), scale.QUICK if asked.quick else scale.FULL)
        try:
            for row in measure_parts(bench, asked.only or PARTS, asked.transport or TRANSPORTS):
                rows.append(row)
                console.print(f"measured: {row.name}: {row.median:.4g} {row.unit}")
        except NotPossible as why:
            print(f"not here: {why}")
            return NOT_POSSIBLE
    Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS).print(*results_tables(rows))
    print(f"commit {run['commit']}, {run['machine']}")
    print(f"every sample: {write_json(asked.results, run, rows)}")
    print(f"the tables: {write_markdown(asked.results, run, rows)}")
    return 0


@contextmanager
def _ended_by_exceptions() -> Generator[None]:
    """Have SIGTERM end the block as an exception does, so that namespaces are removed."""

    def end(*_: object) -> None:
        raise SystemExit("told to end")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
