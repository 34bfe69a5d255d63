"""Figure 9: turns that append more, and turns that generate more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.dual_path.rows import (
    AGENTS,
    BASIC,
    CONDITIONS,
    QUICK_AGENTS,
    SYSTEMS,
    OfflineRow,
    left_out,
    offline_row,
)
from benchmarks.figures.dual_path.simulated_clusters import SimulatedCluster, simulated
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import lines, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class DualPathLengths(Experiment[OfflineRow]):
    """Figure 9."""

    name: ClassVar[str] = "dual_path_lengths"
    title: ClassVar[str] = "DualPath, Figure 9: longer appends, and longer generations, 660B"
    conditions: ClassVar[str] = CONDITIONS

    def run(self, context: Context) -> list[OfflineRow]:
        agents = QUICK_AGENTS if context.is_quick else AGENTS
        trace = "32K" if context.is_quick else "64K"
        factors = (1.0, 4.0) if context.is_quick else (1.0, 2.0, 3.0, 4.0)
        scales = [(factor, 1.0) for factor in factors] + [(1.0, factor) for factor in factors[1:]]
        clusters = {
            (scale, system): SimulatedCluster(
                2, 4, "ds660b", trace, agents, system, "layerwise", *scale
            )
            for scale in scales
            for system in SYSTEMS
        }
        found = simulated(clusters.values(), context.say, is_quick=context.is_quick)
        rows = list[OfflineRow]()
        for (scale, system), cluster in clusters.items():
            first = found[clusters[scale, "single"]]
            is_append = system == "paper" and scale[1] == 1.0
            paper = "1.82 - 1.99 over Basic" if is_append else ""
            rows.append(offline_row("9", cluster, found[cluster], first, paper))
        rows.append(left_out("9", "2P4D", "ds660b", trace, BASIC))
        return rows

    def plot(self, rows: Sequence[OfflineRow]) -> Figure:
        figure, axes = panels(1, 2)
        shown = [row for row in rows if row.jct_s is not None]
        for panel, kind in zip(axes, ("append", "generate"), strict=True):
            mine = [
                row
                for row in shown
                if (row.generate_scale if kind == "append" else row.append_scale) == 1.0
            ]
            series = dict[str, tuple[Sequence[float], Sequence[float]]]()
            for system in dict.fromkeys(row.system for row in mine):
                of_system = [row for row in mine if row.system == system]
                x = [r.append_scale if kind == "append" else r.generate_scale for r in of_system]
                series[system] = (x, [row.jct_s or 0.0 for row in of_system])
            lines(panel, series)
            panel.set_xlabel(f"{kind} tokens a turn, times")
            panel.set_ylabel("completion time, s")
        axes[0].legend(fontsize=6)
        return figure
