"""`python -m benchmarks.compare`: measure the peers side by side, print the table, write it, its
samples and a plot.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from benchmarks.basis.report import commit, machine
from benchmarks.compare.cells import FULL, JUDGED, QUICK, Cell
from benchmarks.compare.contestants import started
from benchmarks.compare.grid import grid_lines
from benchmarks.compare.limits import Limits
from benchmarks.compare.plot import plot
from benchmarks.compare.rounds import Entrant, Pace, log_file, measure_cell
from benchmarks.compare.rows import Row, judge
from benchmarks.compare.table import markdown, write_json
from benchmarks.compare.worker import running_worker
from benchmarks.figures.plots import save

ROUNDS, PATH_S_MAX, REQUESTS_MAX = 5, 3.0, 8192
NAME = "compare"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; exits as argparse does."""
    parser = argparse.ArgumentParser("python -m benchmarks.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two prefixes, for a first look")
    parser.add_argument(
        "--only",
        action="append",
        help="clients with a path whose name holds this word; may be repeated; all servers start",
    )
    parser.add_argument(
        "--prefix", action="append", help="prefixes whose name holds this word; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="samples of a path")
    parser.add_argument(
        "--path-seconds",
        type=float,
        default=PATH_S_MAX,
        help="a path whose fetches of a prefix took longer is measured less often",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(),
        help="where the stores lie while it runs; default: the current directory",
    )
    parser.add_argument("--results", type=Path, default=Path("bench-results/compare"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 whatever the figures are, 1 where a path of our own failed."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    # So that what was started is stopped also when this is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    run: dict[str, object] = {"commit": commit(), "machine": machine(), "quick": options.quick}
    begun_s = time.monotonic()
    options.data_dir.mkdir(parents=True, exist_ok=True)
    rows, limits, failed = _measured(options)
    failures = [f"{each.name} failed: {failure}" for each in failed for failure in each.failures]
    judgements = judge(rows, JUDGED)
    verdicts = [str(judgement) for judgement in judgements]
    state = f"commit {run['commit']}, {run['machine']}, load after {os.getloadavg()[0]:.1f}"
    pace = f"{options.rounds} rounds, fewer of what took {options.path_seconds:g} s in all"
    text = "\n".join(
        [markdown(rows, limits, verdicts), *grid_lines(rows), "", *failures, pace, state, ""]
    )
    options.results.mkdir(parents=True, exist_ok=True)
    table, samples = (options.results / f"{NAME}.{kind}" for kind in ("md", "json"))
    table.write_text(text)
    write_json(samples, run, rows, limits, judgements)
    print(text)
    drawn = save(plot(rows), options.results, NAME)
    files = ", ".join(str(file) for file in (table, samples, *drawn))
    print(f"{files} ({time.monotonic() - begun_s:.0f} s)")
    return int(any(entrant.is_ours for entrant in failed))


def _measured(
    options: argparse.Namespace,
) -> tuple[list[Row], dict[Cell, Limits], list[Entrant]]:
    """Rows, the machine's limits for each cell, and who failed in the midst of it."""
    cells = _chosen(QUICK if options.quick else FULL, options.prefix)
    pace = Pace(options.rounds, options.path_seconds, REQUESTS_MAX)
    rows: list[Row] = []
    limits: dict[Cell, Limits] = {}
    with ExitStack() as undo:
        place = tempfile.TemporaryDirectory(prefix="objectcache-compare-", dir=options.data_dir)
        folder = Path(undo.enter_context(place)).absolute()
        say = _narrator(undo)
        say("starting the servers")
        entrants = _entered(undo, folder, cells, options.only)
        for cell in cells:
            measured, limits[cell] = measure_cell(cell, entrants, pace, say)
            rows += measured
        for entrant in entrants:
            entrant.attempt(lambda worker: worker.close())
    return rows, limits, [entrant for entrant in entrants if entrant.failures]


def _chosen(cells: Sequence[Cell], words: Sequence[str] | None) -> Sequence[Cell]:
    """Those whose names hold one of the words. Exits where there are none."""
    chosen = [cell for cell in cells if words is None or any(word in str(cell) for word in words)]
    if not chosen:
        raise SystemExit(f"no prefix is called so; there are {', '.join(map(str, cells))}")
    return chosen


def _narrator(undo: ExitStack) -> Callable[[str], None]:
    """What shows how far it is: one line that changes, or lines where nobody watches."""
    console = Console(stderr=True)
    if console.is_terminal:
        return undo.enter_context(console.status("")).update
    begun_s = time.monotonic()
    return lambda text: print(f"{time.monotonic() - begun_s:.0f} s: {text}", file=sys.stderr)


def _entered(
    undo: ExitStack, folder: Path, cells: Sequence[Cell], only: Sequence[str] | None
) -> list[Entrant]:
    """Every contestant, with its client connected where its server runs."""
    entrants: list[Entrant] = []
    for number, contestant in enumerate(
        started(undo, folder, max(cell.payload_bytes for cell in cells))
    ):
        names = [way.name for way in contestant.ways]
        if only is not None and not any(word in name for word in only for name in names):
            continue
        if contestant.missing:
            entrants.append(Entrant(contestant, None))
            continue
        log = log_file(folder, number)
        worker = undo.enter_context(running_worker(contestant.client, log))
        entrant = Entrant(contestant, worker)
        entrant.attempt(lambda worker: worker.open())
        entrants.append(entrant)
    return entrants


if __name__ == "__main__":
    sys.exit(main())
