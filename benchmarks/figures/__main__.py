"""`python -m benchmarks.figures`: measure, print tables, write CSV files and plots."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.basis.bench import Bench
from benchmarks.basis.report import commit, machine
from benchmarks.basis.scale import FULL, QUICK
from benchmarks.figures.dual_path.ablation import DualPathAblation
from benchmarks.figures.dual_path.lengths import DualPathLengths
from benchmarks.figures.dual_path.node_ratios import DualPathRatios
from benchmarks.figures.dual_path.offline import DualPathOffline
from benchmarks.figures.dual_path.online import DualPathOnline
from benchmarks.figures.dual_path.scale import DualPathScale
from benchmarks.figures.dual_path.tables import DualPathTables
from benchmarks.figures.experiment import (
    Context,
    Experiment,
    NotPossible,
    cells,
    columns,
    write_csv,
    written,
)
from benchmarks.figures.experiments.aggregation import AggregationExperiment
from benchmarks.figures.experiments.bare_store import BareStoreExperiment
from benchmarks.figures.experiments.elements import ElementsExperiment
from benchmarks.figures.experiments.gpu_links import GpuLinksExperiment
from benchmarks.figures.experiments.kernel_cap import KernelCapExperiment
from benchmarks.figures.experiments.one_object import OneObjectExperiment
from benchmarks.figures.experiments.overhead import OverheadExperiment
from benchmarks.figures.experiments.overlap import OverlapExperiment
from benchmarks.figures.experiments.pacing import PacingExperiment
from benchmarks.figures.experiments.rate_sweep import RateExperiment
from benchmarks.figures.experiments.tenth import TenthExperiment
from benchmarks.figures.experiments.workloads import WorkloadsExperiment
from benchmarks.figures.plots import save, state_conditions

SCALE = 16  # 100 Gbps become 6.25, and the 7 GiB of 64K tokens at 87.5 % become 448 MiB
TABLE_COLUMNS = 220
EXPERIMENTS: tuple[Experiment[Any], ...] = (
    BareStoreExperiment(),
    OneObjectExperiment(),
    AggregationExperiment(),
    OverlapExperiment(),
    ElementsExperiment(),
    OverheadExperiment(),
    TenthExperiment(),
    RateExperiment(),
    WorkloadsExperiment(),
    PacingExperiment(),
    KernelCapExperiment(),
    DualPathTables(),
    DualPathOffline(),
    DualPathRatios(),
    DualPathLengths(),
    DualPathOnline(),
    DualPathAblation(),
    DualPathScale(),
    GpuLinksExperiment(),
)
DUAL_PATH = "dual_path"  # all of them whose names begin so


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; exits as argparse does."""
    parser = argparse.ArgumentParser("python -m benchmarks.figures", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rows, short, for a first look")
    parser.add_argument(
        "--only",
        action="append",
        choices=[*(experiment.name for experiment in EXPERIMENTS), DUAL_PATH],
        help=f"run this alone; may be repeated; {DUAL_PATH} is all whose names begin so",
    )
    parser.add_argument("--scale", type=int, default=SCALE, help="divides bytes and rates")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(),
        help="where the stores lie while it runs; default: the current directory",
    )
    parser.add_argument("--results", type=Path, default=Path("bench-results/figures"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 whatever the figures are."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    options.data_dir.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)
    for experiment in EXPERIMENTS:
        if is_wanted(experiment.name, options.only):
            _run(experiment, options, console)
    console.print(f"commit {commit()}, {machine()}, bytes and rates over {options.scale}")
    if options.quick:
        console.print(
            "A quick run: fewer rows and layers than the paper's; the goals are of a full run."
        )
    return 0


def is_wanted(name: str, only: Sequence[str] | None) -> bool:
    """Whether an experiment of this name runs."""
    return not only or name in only or (DUAL_PATH in only and name.startswith(DUAL_PATH))


def _run(experiment: Experiment[Any], options: argparse.Namespace, console: Console) -> None:
    begun_s = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="objectcache-figures-", dir=options.data_dir) as folder,
        Console(stderr=True).status(experiment.title) as status,
    ):
        bench = Bench(Path(folder).absolute(), QUICK if options.quick else FULL)

        def say(what: str) -> None:
            status.update(f"{experiment.title}: {what}")

        try:
            rows = experiment.run(Context(bench, options.scale, options.quick, say))
        except NotPossible as why:
            console.print(f"{experiment.title}: left out, {why}")
            return
    files = [options.results / f"{experiment.name}.csv"]
    write_csv(files[0], rows)
    figure = experiment.plot(rows)
    state_conditions(figure, experiment.conditions)
    files += save(figure, options.results, experiment.name)
    _print(experiment, rows, console)
    took_s = time.monotonic() - begun_s
    console.print(f"{', '.join(str(file) for file in files)} ({took_s:.0f} s)\n")


def _print(experiment: Experiment[Any], rows: Sequence[object], console: Console) -> None:
    table = Table(title=experiment.title, title_justify="left", title_style="bold")
    for name in columns(rows):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(written(cell) for cell in cells(row)))
    console.print(table, experiment.conditions, *experiment.notes(rows), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
