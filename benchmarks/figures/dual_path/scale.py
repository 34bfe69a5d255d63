"""Table 3, offline: larger clusters with as many agents a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.dual_path.rows import (
    CONDITIONS,
    QUICK_AGENTS,
    OfflineRow,
    left_out,
    offline_row,
    title_of_routes,
    verdict,
)
from benchmarks.figures.dual_path.simulated_clusters import SimulatedCluster, simulated
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import grouped_bars, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGE = "not simulated here: 7.5 million requests (objectcache simulate-cluster does it)"


SCALED_AGENTS = 2000  # of 2P4D; the paper's 48K of 48P96D are as many a node


class DualPathScale(Experiment[OfflineRow]):
    """Table 3, offline."""

    name: ClassVar[str] = "dual_path_scale"
    title: ClassVar[str] = "DualPath, Table 3 (offline): larger clusters with as many agents a node"
    conditions: ClassVar[str] = CONDITIONS

    def run(self, context: Context) -> list[OfflineRow]:
        agents = QUICK_AGENTS if context.is_quick else SCALED_AGENTS
        trace = "32K" if context.is_quick else "64K"
        times = (1, 2) if context.is_quick else (1, 2, 4)
        clusters = [
            SimulatedCluster(2 * each, 4 * each, "ds660b", trace, each * agents, "paper")
            for each in times
        ]
        found = simulated(clusters, context.say, is_quick=context.is_quick)
        first = found[clusters[0]]
        rows = [
            offline_row(
                "Table 3",
                each,
                found[each],
                first,
                "3,167 s" if each == clusters[0] else "",
            )
            for each in clusters
        ]
        large = left_out(
            "Table 3", "48P96D", "ds660b", "64K", title_of_routes("paper"), "3,201 s", LARGE
        )
        return [*rows, large]

    def notes(self, rows: Sequence[OfflineRow]) -> list[str]:
        """How far larger clusters are off the smallest."""
        times = {row.nodes: row.jct_s for row in rows if row.jct_s is not None}
        first_s = next(iter(times.values()))
        return [
            verdict(
                f"{nodes} over 2P4D", jct_s / first_s, "1 +-3 %", abs(jct_s / first_s - 1) <= 0.03
            )
            for nodes, jct_s in list(times.items())[1:]
        ]

    def plot(self, rows: Sequence[OfflineRow]) -> Figure:
        figure, axes = panels(1, 1)
        mine = [row for row in rows if row.jct_s is not None]
        names = [f"{row.nodes},\n{row.agents} agents" for row in mine]
        grouped_bars(axes[0], names, {"completion time": [row.jct_s for row in mine]})
        axes[0].tick_params(axis="x", labelsize=6)
        axes[0].set_ylabel("completion time, s")
        return figure
