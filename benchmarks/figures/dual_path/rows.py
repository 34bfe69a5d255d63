"""Rows of simulated runs, beside what the paper says of the same."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.figures.dual_path.simulated_clusters import ORACLE, SimulatedCluster
from objectcache_laboratory.cluster.measures import ClusterMeasures
from objectcache_laboratory.cluster.placement import PLACINGS
from objectcache_laboratory.cluster.report import title_of

CONDITIONS = (
    "Simulated in virtual time by `objectcache simulate-cluster`'s code, with the dispatcher's own "
    "decisions; no GPU, no network. Trajectories are Table 2's generator's. A prefill GPU's rate "
    "is fitted, one figure a model (docs/dual_path.md). The single path prefills layer by layer."
)
AGENTS, QUICK_AGENTS = 1024, 6
SYSTEMS = ("single", "paper", ORACLE)
BASIC = "Basic"
SGLANG = "SGL(MC)"
NOT_SIMULATED = {
    BASIC: "not simulated: a prefill of whole requests, bounded by GPU memory",
    SGLANG: "not simulated: SGLang with HiCache and Mooncake Store",
}


@dataclass(frozen=True, slots=True)
class OfflineRow:
    """Agents that all begin at once, to the last one's end. `speed_up` is the job completion time
    of the row that it is compared with over this one's; `paper` is what the paper says of it.
    """

    figure: str
    nodes: str
    model: str
    trace: str
    agents: int | None
    append_scale: float
    generate_scale: float
    system: str
    jct_s: float | None
    speed_up: float | None = None
    nic_max_over_mean: float | None = None
    nic_share: float | None = None
    gpu_share: float | None = None
    paper: str = ""
    remark: str = ""


@dataclass(frozen=True, slots=True)
class OnlineRow:
    """Agents that arrive as a Poisson process; times are means over the second half of the run."""

    figure: str
    nodes: str
    model: str
    agents_per_s: float | None
    system: str
    ttft_s: float | None = None
    ttst_s: float | None = None
    tpot_s: float | None = None
    agent_s: float | None = None
    dispatch_s: float | None = None  # the paper's Sch., with what waits for a decode worker
    read_s: float | None = None  # R., to where no layer will be waited for
    queue_s: float | None = None
    prefill_s: float | None = None  # PF.
    is_within_slo: bool | None = None
    paper: str = ""
    remark: str = ""


def offline_row(
    figure: str,
    cluster: SimulatedCluster,
    measures: ClusterMeasures,
    first: ClusterMeasures | None = None,
    paper: str = "",
    remark: str = "",
) -> OfflineRow:
    """Of one run, beside `first`, if any."""
    return OfflineRow(
        figure,
        cluster.nodes,
        cluster.model,
        cluster.trace,
        cluster.agents,
        cluster.append_scale,
        cluster.generate_scale,
        system_of(cluster, measures),
        measures.jct_s,
        None if first is None else first.jct_s / measures.jct_s,
        measures.nic_max_over_mean,
        measures.nic_share,
        measures.gpu_share,
        paper,
        remark,
    )


def title_of_routes(routes: str) -> str:
    """As `system` of a row has it."""
    return PLACINGS[routes].title if routes in PLACINGS else routes


def system_of(cluster: SimulatedCluster, measures: ClusterMeasures) -> str:
    """Its routes, and how it reads where that is not layer by layer."""
    title = title_of(measures)
    return title if cluster.reads == "layerwise" else f"{title}, whole reads"


def left_out(
    figure: str, nodes: str, model: str, trace: str, system: str, paper: str = "", remark: str = ""
) -> OfflineRow:
    """A system that is not simulated, with the reason."""
    remark = remark or NOT_SIMULATED[system]
    return OfflineRow(
        figure, nodes, model, trace, None, 1.0, 1.0, system, None, paper=paper, remark=remark
    )


def verdict(name: str, figure: float, goal: str, is_met: bool) -> str:
    """A line of an experiment's notes."""
    return f"{name} {figure:.3f}: {'met' if is_met else 'missed'} (goal {goal})"
