"""`python -m benchmarks.shared_store`: a shared store beside what it can do by itself."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.basis.measure import Row
from benchmarks.basis.report import commit, machine, results_tables, write_json, write_markdown
from benchmarks.shared_store.bench import FULL, QUICK, SharedBench
from benchmarks.shared_store.commits import measure_commits
from benchmarks.shared_store.many_chunks import measure_many_chunks
from benchmarks.shared_store.reads import measure_reads
from benchmarks.shared_store.s3_reads import measure_s3_reads
from benchmarks.shared_store.several_servers import measure_servers
from benchmarks.shared_store.tiers import measure_tiers
from tests.ceph import reason_to_skip

TABLE_COLUMNS = 160
QUESTIONS: dict[str, Callable[[SharedBench], Iterator[Row]]] = {
    "reads": measure_reads,
    "commits": measure_commits,
    "servers": measure_servers,
    "many-chunks": measure_many_chunks,
    "s3": measure_s3_reads,
    "tiers": measure_tiers,
}


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 0 whatever the figures are, 2 where Ceph cannot be started."""
    parser = argparse.ArgumentParser("python -m benchmarks.shared_store", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small volume, for a first look")
    parser.add_argument("--only", action="append", choices=QUESTIONS, help="may be repeated")
    parser.add_argument("--results", type=Path, default=Path("bench-results"))
    options = parser.parse_args(arguments)
    if reason := reason_to_skip():
        print(reason, file=sys.stderr)
        return 2
    amount = QUICK if options.quick else FULL
    run: dict[str, object] = {"commit": commit(), "machine": machine(), "scale": amount}
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="shared-") as folder,
        ExitStack() as undo,
        Console(stderr=True).status("measuring") as status,
    ):
        bench = SharedBench(Path(folder), amount, undo)
        for name, question in QUESTIONS.items():
            if name in (options.only or QUESTIONS):
                status.update(f"measuring {name}")
                rows += question(bench)
    Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS).print(*results_tables(rows))
    print(f"commit {run['commit']}, {run['machine']}")
    print(f"every sample: {write_json(options.results, run, rows)}")
    print(f"the tables: {write_markdown(options.results, run, rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
