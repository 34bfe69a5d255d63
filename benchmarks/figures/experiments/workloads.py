"""Figure 16: workloads A, B and C under each policy, all requests of one at once.

A request's added TTFT is over its own without an effective limit: alone, at the paper's 100 Gbps,
and admitted in the same way. Policies that assign rates let a request in at the end of an epoch,
also one that is alone, so for them the base has that wait too. The notes judge without it: what
everybody waits for is a cost of those policies.

Under policies that assign rates a run counts where all requests were admitted in one epoch and each
achieved its rate. Others are repeated, and pointed out where that does not help.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.experiments.workload_notes import workload_notes
from benchmarks.figures.experiments.workload_rows import (
    ALL,
    BOUND,
    CALIBRATED,
    DYNAMIC,
    EQUAL,
    POLICIES,
    Measured,
    Run,
    Runs,
    WorkloadRow,
    predicted,
    taken,
    workload_rows,
)
from benchmarks.figures.paper_data import LINK_GBPS, NUM_LAYERS, WORKLOADS, PaperWorkload
from benchmarks.figures.plots import grouped_bars, panels
from benchmarks.figures.scaled import QUICK_LAYERS, ScaledRequest, schedule
from benchmarks.figures.served import Fetched, Served, served
from objectcache_schemas.policy_names import PolicyName

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUICK_POLICIES: tuple[PolicyName, ...] = (EQUAL, CALIBRATED, DYNAMIC)
EPOCH_S = 0.02  # all requests of a workload are there within one
REPEATS, REPEATS_OTHER = 3, 1  # of those that have a goal, and of the others: time is short
RERUNS_MAX = 3  # of a policy, for all its repeats
SHORT_S, SHORT_SAMPLES = 3.0, 3  # of requests that are computed in less time


class WorkloadsExperiment(Experiment[WorkloadRow]):
    """Figure 16."""

    name: ClassVar[str] = "workloads"
    title: ClassVar[str] = "Figure 16: added TTFT of three workloads, by policy"
    conditions: ClassVar[str] = (
        "Bytes and rates are the paper's over the scale, times are not scaled. GPUs are emulated; "
        "the scheduler paces shared memory on one host."
    )

    def run(self, context: Context) -> list[WorkloadRow]:
        names = ("A",) if context.is_quick else tuple(WORKLOADS)
        layers = QUICK_LAYERS if context.is_quick else NUM_LAYERS
        rows: list[WorkloadRow] = []
        with served(context.bench) as store:
            workloads = {
                name: _Workload(store, WORKLOADS[name], context.scale, layers) for name in names
            }
            context.say("each request alone")
            bases_s = _bases(store, workloads, context.scale)
            for name, workload in workloads.items():
                measured = _under_each_policy(context, name, workload)
                rows += workload_rows(name, workload.requests, measured, bases_s, context.scale)
        return rows

    def plot(self, rows: Sequence[WorkloadRow]) -> Figure:
        workloads = list(dict.fromkeys(row.workload for row in rows))
        figure, axes = panels(len(workloads), 2)
        for index, workload in enumerate(workloads):
            mine = [row for row in rows if row.workload == workload]
            policies = list(dict.fromkeys(row.policy for row in mine if row.policy != BOUND))
            by_key = {(row.policy, row.request): row for row in mine}
            _plot_rates(axes[2 * index], policies, by_key)
            _plot_added(axes[2 * index + 1], policies, by_key)
            for panel in axes[2 * index : 2 * index + 2]:
                panel.set_title(f"workload {workload}: {panel.get_title()}")
        for panel in axes[:2]:
            panel.legend(loc="upper left", fontsize=6)
        return figure

    def notes(self, rows: Sequence[WorkloadRow]) -> list[str]:
        """What calibrated_stall_opt and stall_dynamic had to reach."""
        return workload_notes(rows, EPOCH_S, RERUNS_MAX)


def _plot_rates(
    axes: Axes, policies: Sequence[str], rows: Mapping[tuple[str, str], WorkloadRow]
) -> None:
    requests = list(dict.fromkeys(request for _, request in rows if request != ALL))
    rates = {
        policy: [rows[policy, request].achieved_gbps for request in requests] for policy in policies
    }
    grouped_bars(axes, requests, rates)
    axes.set_title("achieved rate, Gbps")
    axes.tick_params(axis="x", labelsize=7)


def _plot_added(
    axes: Axes, policies: Sequence[str], rows: Mapping[tuple[str, str], WorkloadRow]
) -> None:
    totals = [rows[policy, ALL] for policy in policies]
    bars = {
        "measured": [row.added_ms for row in totals],
        "overlap model": [row.model_added_ms for row in totals],
        "paper": [row.paper_added_ms for row in totals],
    }
    grouped_bars(axes, [name.replace("_", "\n") for name in policies], bars)
    bound_ms = rows[BOUND, ALL].model_added_ms or 0.0
    axes.axhline(bound_ms, color="black", linestyle="--", linewidth=0.8, label=BOUND)
    axes.set_title("added TTFT, ms")
    axes.tick_params(axis="x", labelsize=6)


class _Workload:
    """Requests that start together, with a GPU each."""

    def __init__(self, store: Served, paper: PaperWorkload, scale: int, num_layers: int) -> None:
        self._store = store
        self._paper = paper
        self._scale = scale
        self.requests = [
            ScaledRequest(request, scale, num_layers=num_layers) for request in paper.requests
        ]
        for request in self.requests:
            store.load(request)
        self._gpus = [store.gpu(request) for request in self.requests]

    def run(self, policy: PolicyName, repeats: int) -> Runs:
        """So many good runs under the policy, or what there is after RERUNS_MAX more."""
        self._store.schedule(schedule(policy, self._paper.cap_gbps, self._scale, EPOCH_S))
        expected = None
        if policy != DYNAMIC:
            model = predicted(self._paper, self.requests, policy, self._scale)
            expected = tuple(request.rate_bytes_per_s for request in model.requests)
        runs: list[Run] = []
        while len(runs) < repeats + RERUNS_MAX:
            measured = [self._measured(one) for one in self._once()]
            runs.append(Run(tuple(measured), expected))
            if sum(run.is_together and run.is_on_rate for run in runs) == repeats:
                break
        return taken(runs, repeats)

    def _once(self) -> list[Fetched]:
        barrier = threading.Barrier(len(self.requests))

        def prefill(index: int) -> Fetched:
            barrier.wait()
            return self._store.prefill(self.requests[index], self._gpus[index])

        with ThreadPoolExecutor(len(self.requests)) as pool:
            return list(pool.map(prefill, range(len(self.requests))))

    def _measured(self, fetched: Fetched) -> Measured:
        achieved = self._store.trace(fetched.request_id).achieved_bytes_per_s
        return Measured(fetched.prefill.ttft_s, fetched.rate_bytes_per_s, achieved)


def _bases(
    store: Served, workloads: Mapping[str, _Workload], scale: int
) -> dict[str, dict[str, float]]:
    """By policy, seconds to the first token of each request alone, at the paper's link."""
    requests = {r.paper.name: r for workload in workloads.values() for r in workload.requests}
    by_admission: dict[str, dict[str, float]] = {}
    for policy in (DYNAMIC, EQUAL):  # equal gives the whole link to who is alone
        store.schedule(schedule(policy, LINK_GBPS, scale, EPOCH_S))
        by_admission[policy] = {name: _alone_s(store, one) for name, one in requests.items()}
    return {policy: by_admission[policy if policy == DYNAMIC else EQUAL] for policy in POLICIES}


def _alone_s(store: Served, request: ScaledRequest) -> float:
    gpu = store.gpu(request)
    is_short = request.num_layers * request.paper.window_s < SHORT_S
    samples = [
        store.prefill(request, gpu).prefill.ttft_s for _ in range(SHORT_SAMPLES if is_short else 1)
    ]
    return statistics.median(samples)


def _under_each_policy(context: Context, name: str, workload: _Workload) -> dict[PolicyName, Runs]:
    measured: dict[PolicyName, Runs] = {}
    for policy in QUICK_POLICIES if context.is_quick else POLICIES:
        context.say(f"workload {name}, {policy}")
        has_goal = policy in QUICK_POLICIES
        repeats = REPEATS if has_goal and not context.is_quick else REPEATS_OTHER
        measured[policy] = workload.run(policy, repeats)
    return measured
