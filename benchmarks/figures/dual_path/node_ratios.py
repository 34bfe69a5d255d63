"""Figure 8: nodes for prefill and for decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.dual_path.rows import (
    AGENTS,
    CONDITIONS,
    QUICK_AGENTS,
    SYSTEMS,
    OfflineRow,
    offline_row,
    title_of_routes,
    verdict,
)
from benchmarks.figures.dual_path.simulated_clusters import SimulatedCluster, simulated
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import grouped_bars, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATIO_NODES = ((1, 1), (2, 1), (1, 2))
PAPER_RATIOS = {"1P1D": "up to 1.78", "1P2D": "up to 2.46", "2P1D": ""}
# Of systems whose storage NICs are equal, the nodes and routes of each.
EQUIVALENCES = (
    (("1P1D", "single"), ("1P2D", "single")),
    (("1P1D", "paper"), ("2P1D", "single")),
    (("2P1D", "paper"), ("1P2D", "paper")),
)


class DualPathRatios(Experiment[OfflineRow]):
    """Figure 8."""

    name: ClassVar[str] = "dual_path_ratios"
    title: ClassVar[str] = "DualPath, Figure 8: nodes for prefill and for decode, 27B"
    conditions: ClassVar[str] = CONDITIONS

    def run(self, context: Context) -> list[OfflineRow]:
        agents = QUICK_AGENTS if context.is_quick else AGENTS
        trace = "32K" if context.is_quick else "64K"
        clusters = {
            (nodes, system): SimulatedCluster(*nodes, "ds27b", trace, agents, system)
            for nodes in RATIO_NODES
            for system in SYSTEMS
        }
        found = simulated(clusters.values(), context.say, is_quick=context.is_quick)
        rows = list[OfflineRow]()
        for (nodes, system), cluster in clusters.items():
            first = found[clusters[nodes, "single"]]
            paper = PAPER_RATIOS[cluster.nodes] if system == "paper" else ""
            rows.append(offline_row("8", cluster, found[cluster], first, paper))
        return rows

    def plot(self, rows: Sequence[OfflineRow]) -> Figure:
        figure, axes = panels(1, 1)
        nodes = list(dict.fromkeys(row.nodes for row in rows))
        systems = list(dict.fromkeys(row.system for row in rows))
        times = {(row.system, row.nodes): row.jct_s for row in rows}
        bars = {system: [times[system, each] for each in nodes] for system in systems}
        grouped_bars(axes[0], nodes, bars)
        axes[0].set_ylabel("completion time, s")
        axes[0].legend(fontsize=6)
        return figure

    def notes(self, rows: Sequence[OfflineRow]) -> list[str]:
        """The mean gain, and pairs that read over as many NICs."""
        gains = [row.speed_up or 0.0 for row in rows if row.system == title_of_routes("paper")]
        mean = sum(gains) / len(gains)
        said = [verdict("mean gain", mean, "1.5 - 1.9; paper 1.64", 1.5 <= mean <= 1.9)]
        times = {(row.nodes, row.system): row.jct_s or 0.0 for row in rows}
        for (nodes, routes), (other, others_routes) in EQUIVALENCES:
            ratio = (
                times[nodes, title_of_routes(routes)] / times[other, title_of_routes(others_routes)]
            )
            name = f"{routes} {nodes} over {others_routes} {other}"
            said.append(verdict(name, ratio, '1 +-5 %; paper "comparable"', abs(ratio - 1) <= 0.05))
        return said
