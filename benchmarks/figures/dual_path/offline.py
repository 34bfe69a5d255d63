"""Figure 7: agents that all begin at once, by their number and their longest context."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.dual_path.rows import (
    AGENTS,
    BASIC,
    CONDITIONS,
    QUICK_AGENTS,
    SGLANG,
    SYSTEMS,
    OfflineRow,
    left_out,
    offline_row,
)
from benchmarks.figures.dual_path.simulated_clusters import SimulatedCluster, simulated
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import grouped_bars, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_NODES = {"ds27b": (1, 1), "ds660b": (2, 4), "qwen32b": (1, 2)}
PAPER_GAINS = {
    "ds27b": "up to 1.78 over Basic; Oracle 1.09 - 1.85 faster",
    "ds660b": "up to 1.87 over Basic; as the Oracle",
    "qwen32b": "as 27B",
}


class DualPathOffline(Experiment[OfflineRow]):
    """Figure 7."""

    name: ClassVar[str] = "dual_path_offline"
    title: ClassVar[str] = "DualPath, Figure 7: completion times by agents and longest context"
    conditions: ClassVar[str] = CONDITIONS

    def run(self, context: Context) -> list[OfflineRow]:
        traces = ("32K",) if context.is_quick else ("32K", "48K", "64K")
        counts = (QUICK_AGENTS,) if context.is_quick else (AGENTS // 2, AGENTS)
        grid = list(product(DEFAULT_NODES, traces, counts))
        clusters = {
            (model, trace, count, system): SimulatedCluster(
                *DEFAULT_NODES[model], model, trace, count, system
            )
            for model, trace, count in grid
            for system in SYSTEMS
        }
        found = simulated(clusters.values(), context.say, is_quick=context.is_quick)
        rows = list[OfflineRow]()
        for cell in grid:
            first = found[clusters[*cell, "single"]]
            for system in SYSTEMS:
                cluster = clusters[*cell, system]
                paper = PAPER_GAINS[cell[0]] if system == "paper" else ""
                rows.append(offline_row("7", cluster, found[cluster], first, paper))
        for model, (prefill, decode) in DEFAULT_NODES.items():
            for system in (BASIC, SGLANG):
                rows.append(left_out("7", f"{prefill}P{decode}D", model, "", system))
        return rows

    def plot(self, rows: Sequence[OfflineRow]) -> Figure:
        models = list(DEFAULT_NODES)
        traces = list(dict.fromkeys(row.trace for row in rows if row.trace))
        figure, axes = panels(len(models), len(traces))
        for panel, (model, trace) in zip(axes, product(models, traces), strict=True):
            mine = [row for row in rows if (row.model, row.trace) == (model, trace)]
            counts = list(dict.fromkeys(row.agents for row in mine))
            systems = list(dict.fromkeys(row.system for row in mine))
            found = {(row.system, row.agents): row.jct_s for row in mine}
            bars = {name: [found[name, count] for count in counts] for name in systems}
            grouped_bars(panel, [f"{count} agents" for count in counts], bars)
            panel.set_title(f"{model}, {mine[0].nodes}, {trace}", fontsize=8)
            panel.set_ylabel("completion time, s")
        axes[0].legend(fontsize=6)
        return figure

    def notes(self, rows: Sequence[OfflineRow]) -> list[str]:
        """The most that each model gains."""
        lines_said = list[str]()
        for model in DEFAULT_NODES:
            gains = [row.speed_up or 0.0 for row in rows if row.model == model and row.paper]
            lines_said.append(
                f"{model}: dual over single path {min(gains):.2f} - {max(gains):.2f} "
                f"(paper: {PAPER_GAINS[model]})"
            )
        return lines_said
