"""Table 1: bytes that are read for each FLOP. Table 2: the traces, as the generator makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.dual_path.simulated_clusters import SEED
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import grouped_bars, panels
from objectcache_laboratory.cluster.models import TABLE_1, model_named
from objectcache_laboratory.cluster.trajectories import (
    TRACE_TRAJECTORIES,
    TRACES,
    generate,
    table_2,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONTEXTS = (16 * 1024, 64 * 1024)
COLUMNS = ("turns", "append", "generate", "total", "context")


@dataclass(frozen=True, slots=True)
class TableRow:
    """One cell of the paper's Table 1 or 2."""

    table: str
    of: str  # a model, or a trace
    column: str
    unit: str
    ours: float
    paper: float

    @property
    def off_percent(self) -> float:
        """Ours over the paper's."""
        return 100 * (self.ours / self.paper - 1)


class DualPathTables(Experiment[TableRow]):
    """Tables 1 and 2."""

    name: ClassVar[str] = "dual_path_tables"
    title: ClassVar[str] = "DualPath, Tables 1 and 2: cache-compute ratios, and traces"
    conditions: ClassVar[str] = (
        "Table 1 is arithmetic over published shapes, 429 tokens appended. Table 2 is the "
        f"generator's, {TRACE_TRAJECTORIES} trajectories: the paper published no trajectory."
    )

    def run(self, context: Context) -> list[TableRow]:
        return [*ratio_rows(), *trace_rows()]

    def plot(self, rows: Sequence[TableRow]) -> Figure:
        figure, axes = panels(1, 2)
        for panel, table in zip(axes, ("1", "2"), strict=True):
            mine = [row for row in rows if row.table == table]
            names = list(dict.fromkeys(row.of for row in mine))
            columns = list(dict.fromkeys(row.column for row in mine))
            found = {(row.of, row.column): row.off_percent for row in mine}
            bars = {column: [found[name, column] for name in names] for column in columns}
            grouped_bars(panel, names, bars)
            panel.tick_params(axis="x", labelsize=6)
            panel.set_title(f"Table {table}")
            panel.set_ylabel("off the paper's, %")
            panel.legend(fontsize=6)
        return figure

    def notes(self, rows: Sequence[TableRow]) -> list[str]:
        """How far the furthest cell is off."""
        lines = list[str]()
        for table, most in (("1", 15.0), ("2", 3.0)):
            worst = max(
                (row for row in rows if row.table == table), key=lambda r: abs(r.off_percent)
            )
            said = "met" if abs(worst.off_percent) <= most else "missed"
            lines.append(
                f"Table {table}: at most {worst.off_percent:+.1f} % off ({worst.of}, "
                f"{worst.column}): {said} (goal {most:g} %)"
            )
        return lines


def ratio_rows() -> Iterator[TableRow]:
    """Table 1."""
    for name, papers in TABLE_1.items():
        model = model_named(name)
        for context_tokens, paper in zip(CONTEXTS, papers, strict=True):
            ours = model.gbytes_per_pflop(context_tokens)
            column = f"{context_tokens // 1024}K"
            yield TableRow("1", name, column, "GB/PFLOP", ours, paper)


def trace_rows() -> Iterator[TableRow]:
    """Table 2."""
    for shape in TRACES.values():
        row = table_2(generate(shape, TRACE_TRAJECTORIES, SEED))
        for column in COLUMNS:
            unit = "turns" if column == "turns" else "tokens"
            ours, paper = float(getattr(row, column)), float(getattr(shape, column))
            yield TableRow("2", shape.name, column, unit, ours, paper)
