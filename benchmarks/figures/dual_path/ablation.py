"""Figures 12 (right) and 13: what each part gains, and the balance of storage NICs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.dual_path.rows import (
    AGENTS,
    BASIC,
    CONDITIONS,
    QUICK_AGENTS,
    OfflineRow,
    left_out,
    offline_row,
    title_of_routes,
    verdict,
)
from benchmarks.figures.dual_path.simulated_clusters import ORACLE, SimulatedCluster, simulated
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import grouped_bars, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_ABLATION = {
    "single": "1 (its JCT: 17.21 % below Basic's)",
    "round_robin": "1.34 (38.19 % below Basic)",
    "paper": "1.52 (45.62 % below Basic)",
}
PAPER_BALANCE = {"round_robin": "NIC max/mean 1.53", "paper": "NIC max/mean 1.18"}
BALANCED = ("round_robin", "paper", "least_lateness", "split", "any_node", "split_any_node")


class DualPathAblation(Experiment[OfflineRow]):
    """Figures 12 (right) and 13."""

    name: ClassVar[str] = "dual_path_ablation"
    title: ClassVar[str] = "DualPath, Figures 12 (right) and 13: gains, and balance of NICs"
    conditions: ClassVar[str] = CONDITIONS

    def run(self, context: Context) -> list[OfflineRow]:
        counts = (QUICK_AGENTS,) if context.is_quick else (AGENTS, 2 * AGENTS)
        trace = "32K" if context.is_quick else "64K"
        whole = [
            SimulatedCluster(2, 4, "ds660b", trace, count, "single", "whole") for count in counts
        ]
        layerwise = [
            SimulatedCluster(2, 4, "ds660b", trace, count, system)
            for count in counts
            for system in (*PAPER_ABLATION, ORACLE)
        ]
        balanced = [
            SimulatedCluster(2, 4, "ds660b", trace, counts[0], system) for system in BALANCED
        ]
        clusters = [*whole, *layerwise, *balanced]
        found = simulated(clusters, context.say, is_quick=context.is_quick)
        firsts = {each.agents: found[each] for each in layerwise if each.routes == "single"}
        rows = [left_out("12", "2P4D", "ds660b", trace, BASIC)]
        for cluster in [*whole, *layerwise]:
            paper = PAPER_ABLATION.get(cluster.routes, "") if cluster.reads == "layerwise" else ""
            first = firsts[cluster.agents]
            rows.append(offline_row("12", cluster, found[cluster], first, paper))
        for cluster in balanced:
            paper = PAPER_BALANCE.get(cluster.routes, "")
            first = firsts[cluster.agents]
            rows.append(offline_row("13", cluster, found[cluster], first, paper))
        return rows

    def plot(self, rows: Sequence[OfflineRow]) -> Figure:
        figure, axes = panels(1, 2)
        gains = [row for row in rows if row.figure == "12" and row.jct_s is not None]
        counts = list(dict.fromkeys(row.agents for row in gains))
        systems = list(dict.fromkeys(row.system for row in gains))
        times = {(row.system, row.agents): row.jct_s for row in gains}
        grouped_bars(
            axes[0],
            [f"{count} agents" for count in counts],
            {system: [times[system, count] for count in counts] for system in systems},
        )
        axes[0].set_ylabel("completion time, s")
        axes[0].legend(fontsize=6)
        balance = [row for row in rows if row.figure == "13"]
        papers: list[float | None] = [
            float(row.paper.split()[-1]) if row.paper else None for row in balance
        ]
        bars = {"ours": [row.nic_max_over_mean for row in balance], "the paper's": papers}
        grouped_bars(axes[1], [row.system.replace(", ", ",\n") for row in balance], bars)
        axes[1].tick_params(axis="x", labelsize=4)
        axes[1].set_ylabel("storage NICs, max / mean")
        axes[1].legend(fontsize=6)
        return figure

    def notes(self, rows: Sequence[OfflineRow]) -> list[str]:
        """The goals of both figures, of the first count of agents."""
        first = {row.system: row for row in reversed(rows) if row.figure == "12"}
        said = list[str]()
        for routes, paper in (("round_robin", 1.34), ("paper", 1.52)):
            gain = first[title_of_routes(routes)].speed_up or 0.0
            goal = f"{paper} +-10 %"
            is_met = abs(gain / paper - 1) <= 0.10
            said.append(verdict(f"{routes} over single path", gain, goal, is_met))
        balance = {row.system: row.nic_max_over_mean or 0.0 for row in rows if row.figure == "13"}
        for routes, least, most in (
            ("round_robin", 1.35, 1.65),
            ("paper", 1.0, 1.30),
            ("any_node", 1.0, 1.10),
        ):
            figure = balance[title_of_routes(routes)]
            name = f"NIC max/mean of {routes}"
            said.append(verdict(name, figure, f"{least:g} - {most:g}", least <= figure <= most))
        return said
