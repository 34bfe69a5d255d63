"""Figures 10, 11 and 12 (left), and Table 3's online half: agents that arrive.

Capacity is the most agents a second at which a system keeps the SLO: TTFT of at most 4 s and TPOT
of at most 50 ms, by their means, as the paper's Figure 10 has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.dual_path.rows import (
    BASIC,
    CONDITIONS,
    NOT_SIMULATED,
    SGLANG,
    SYSTEMS,
    OnlineRow,
    system_of,
    title_of_routes,
    verdict,
)
from benchmarks.figures.dual_path.simulated_clusters import SimulatedCluster, simulated
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.plots import lines, panels
from objectcache_laboratory.cluster.measures import ClusterMeasures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SLO_TTFT_S, SLO_TPOT_S = 4.0, 0.050
DURATION_S, QUICK_DURATION_S = 1800.0, 60.0
NODES = {"ds27b": (1, 1), "ds660b": (2, 4)}
RATES = {
    "ds27b": (0.2, 0.3, 0.36, 0.4, 0.44, 0.5, 0.6, 0.7, 0.8),
    "ds660b": (0.1, 0.2, 0.3, 0.38, 0.4, 0.42, 0.46, 0.5, 0.6, 0.7),
}
QUICK_RATES = {"ds27b": (0.2, 0.4), "ds660b": (0.4,)}
GAIN_MIN = 1.67
PAPER_CAPACITY = {"ds27b": 1.67, "ds660b": 2.25}
# Table 3, DualPath on 2P4D.
PAPER_AT_04 = "TTFT 1.739, TTST 0.228, TPOT 0.039 s"
PAPER_LARGE = "44P88D at 8.8 agents/s: TTFT 1.847, TTST 0.194, TPOT 0.036 s"


class DualPathOnline(Experiment[OnlineRow]):
    """Figures 10, 11 and 12 (left)."""

    name: ClassVar[str] = "dual_path_online"
    title: ClassVar[str] = "DualPath, Figures 10, 11, 12 (left): agents that arrive, and latencies"
    conditions: ClassVar[str] = (
        f"{CONDITIONS} Half an hour of Poisson arrivals, of which the second half is measured; no "
        "time between turns."
    )

    def run(self, context: Context) -> list[OnlineRow]:
        duration_s = QUICK_DURATION_S if context.is_quick else DURATION_S
        clusters = [
            SimulatedCluster.arriving(NODES[model], model, system, rate, duration_s)
            for model, rates in (QUICK_RATES if context.is_quick else RATES).items()
            for system in SYSTEMS
            for rate in rates
        ]
        found = simulated(clusters, context.say, is_quick=context.is_quick)
        rows = [online_row(cluster, found[cluster]) for cluster in clusters]
        for model, (prefill, decode) in NODES.items():
            for system in (BASIC, SGLANG):
                remark = NOT_SIMULATED[system]
                rows.append(
                    OnlineRow("10", f"{prefill}P{decode}D", model, None, system, remark=remark)
                )
        remark = "not simulated here: 5 million requests an hour"
        large = OnlineRow("Table 3", "44P88D", "ds660b", 8.8, title_of_routes("paper"))
        return [*rows, replace(large, paper=PAPER_LARGE, remark=remark)]

    def plot(self, rows: Sequence[OnlineRow]) -> Figure:
        shown = [row for row in rows if row.ttft_s is not None]
        models = list(dict.fromkeys(row.model for row in shown))
        measures = ("ttft_s", "ttst_s", "tpot_s", "agent_s")
        figure, axes = panels(len(models), len(measures))
        for number, model in enumerate(models):
            mine = [row for row in shown if row.model == model]
            for panel, measure in zip(axes[number * len(measures) :], measures, strict=False):
                series = dict[str, tuple[Sequence[float], Sequence[float]]]()
                for system in dict.fromkeys(row.system for row in mine):
                    of_system = [row for row in mine if row.system == system]
                    series[system] = (
                        [row.agents_per_s or 0.0 for row in of_system],
                        [getattr(row, measure) for row in of_system],
                    )
                lines(panel, series)
                panel.set_xlabel("agents/s")
                panel.set_title(f"{model}, {mine[0].nodes}: {measure}", fontsize=8)
                if measure == "ttft_s":
                    panel.set_ylim(0, SLO_TTFT_S)
        axes[0].legend(fontsize=6)
        return figure

    def notes(self, rows: Sequence[OnlineRow]) -> list[str]:
        """Capacities, and TTFT at nine tenths of a single path's."""
        said = list[str]()
        for model in NODES:
            mine = [row for row in rows if row.model == model and row.ttft_s is not None]
            capacities = {
                system: capacity_of([r for r in mine if r.system == title_of_routes(system)])
                for system in SYSTEMS
            }
            figures = ", ".join(f"{name} {at:.3g}" for name, at in capacities.items())
            said.append(f"{model}: capacity in agents/s {figures}")
            single = capacities["single"]
            if not single:
                continue
            gain, paper = capacities["paper"] / single, PAPER_CAPACITY[model]
            goal = f"at least {GAIN_MIN:g}; paper, over Basic, {paper}"
            said.append(verdict(f"{model}: capacity", gain, goal, gain >= GAIN_MIN))
            near = min((r.agents_per_s or 0.0 for r in mine), key=lambda a: abs(a - 0.9 * single))
            of_single, of_dual = (
                row.ttft_s or 0.0
                for system in ("single", "paper")
                for row in mine
                if row.agents_per_s == near and row.system == title_of_routes(system)
            )
            name = f"{model}: TTFT at {near:g} agents/s, single over dual path"
            said.append(verdict(name, of_single / of_dual, "at least 4", of_single >= 4 * of_dual))
        return said


def online_row(cluster: SimulatedCluster, measures: ClusterMeasures) -> OnlineRow:
    """Of one run."""
    ttft_s, tpot_s = measures.ttft_s.mean, measures.tpot_s.mean
    is_table_3 = (cluster.nodes, cluster.routes, cluster.agents_per_s) == ("2P4D", "paper", 0.4)
    return OnlineRow(
        "10, 11, 12",
        cluster.nodes,
        cluster.model,
        cluster.agents_per_s,
        system_of(cluster, measures),
        ttft_s,
        measures.ttst_s.mean,
        tpot_s,
        measures.agent_s.mean,
        measures.dispatch_s.mean,
        measures.read_s.mean,
        measures.queue_s.mean,
        measures.prefill_s.mean,
        ttft_s <= SLO_TTFT_S and tpot_s <= SLO_TPOT_S,
        PAPER_AT_04 if is_table_3 else "",
    )


def capacity_of(rows: Sequence[OnlineRow]) -> float:
    """The most agents a second within the SLO, of rows by rising rate; 0 where none is."""
    capacity = 0.0
    for row in rows:
        if not row.is_within_slo:
            break
        capacity = row.agents_per_s or 0.0
    return capacity
