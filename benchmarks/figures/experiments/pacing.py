"""Pacing: does each delivery get the rate that it was assigned, and the link no more than its cap.

Once by the engine, the scheduler and the readers in this process, with a stamp for every fragment;
and once through the server, by the layers that arrive.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from benchmarks.deliveries.warm import CACHED_BYTES
from benchmarks.figures.experiment import Context, Experiment
from benchmarks.figures.paced_store import Paced, PacedStore
from benchmarks.figures.paper_data import MARGIN_GBPS, WORKLOADS
from benchmarks.figures.plots import grouped_bars, panels
from benchmarks.figures.rates import (
    WINDOW_S,
    achieved_bytes_per_s,
    longest_gap_s,
    most_in_window,
    spread,
)
from benchmarks.figures.scaled import ScaledRequest, schedule
from benchmarks.figures.served import Served, served
from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_schemas.operators.schedule import ScheduleConfiguration
from objectcache_schemas.policy_names import FOR_LIFE, PolicyName

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IN_PROCESS = "dispatcher"
SERVER = "server"
WORKLOAD = "C"  # the most deliveries
LAYERS, QUICK_LAYERS = 16, 4
POLICIES: tuple[PolicyName, ...] = ("equal", "calibrated_stall_opt", "stall_dynamic")
DYNAMIC = "stall_dynamic"
EPOCH_S = 0.02
ALL = "all"
RATE_GOAL_PERCENT = 3.0
CAP_GOAL_PERCENT = 2.0


@dataclass(frozen=True, slots=True)
class PacingRow:
    """One delivery, or all of them; rates are multiplied back to the paper's."""

    measured_by: str
    policy: str
    delivery: str
    assigned_gbps: float | None  # of all: the cap
    achieved_gbps: float
    off_percent: float | None
    longest_gap_ms: float | None = None  # between two fragments of the delivery
    implied_gap_ms: float | None = None  # a fragment at its rate
    over_cap_percent: float | None = None  # of all, in the worst 200 ms


class PacingExperiment(Experiment[PacingRow]):
    """No figure of the paper: what its figures rest on."""

    name: ClassVar[str] = "pacing"
    title: ClassVar[str] = "Pacing: achieved rates against assigned ones, and the cap"
    conditions: ClassVar[str] = (
        "Bytes and rates are the paper's over the scale. Bytes go into memory of the process, or "
        "through shared memory on one host."
    )

    def run(self, context: Context) -> list[PacingRow]:
        layers = QUICK_LAYERS if context.is_quick else LAYERS
        requests = [
            ScaledRequest(paper, context.scale, num_layers=layers)
            for paper in WORKLOADS[WORKLOAD].requests
        ]
        rows: list[PacingRow] = []
        with context.bench.store(page_cache_bytes=CACHED_BYTES) as store:
            paced = PacedStore(store, requests)
            for policy in POLICIES:
                context.say(f"{IN_PROCESS}, {policy}")
                deliveries = paced.run(_configuration(policy, context.scale))
                rows += pacing_rows(IN_PROCESS, policy, deliveries, context.scale)
        with served(context.bench) as server:
            for request in requests:
                server.load(request)
            for policy in POLICIES:
                context.say(f"{SERVER}, {policy}")
                deliveries = _through(server, requests, policy)
                rows += pacing_rows(SERVER, policy, deliveries, context.scale)
        return rows

    def plot(self, rows: Sequence[PacingRow]) -> Figure:
        figure, axes = panels(1, 2)
        for panel, measured_by in zip(axes, (IN_PROCESS, SERVER), strict=True):
            mine = [row for row in rows if row.measured_by == measured_by and row.delivery != ALL]
            names = list(dict.fromkeys(row.delivery for row in mine))
            series: dict[str, list[float | None]] = {
                policy: [row.off_percent for row in mine if row.policy == policy]
                for policy in POLICIES
                if policy != DYNAMIC
            }
            grouped_bars(panel, names, series)
            panel.set_title(f"achieved less assigned rate, % ({measured_by})")
            panel.tick_params(axis="x", labelsize=6)
        axes[0].legend(loc="upper left", fontsize=7)
        return figure

    def notes(self, rows: Sequence[PacingRow]) -> list[str]:
        """What was to be reached."""
        lines = []
        for measured_by in (IN_PROCESS, SERVER):
            mine = [row for row in rows if row.measured_by == measured_by]
            off = max(abs(row.off_percent or 0.0) for row in mine if row.delivery != ALL)
            over = max(row.over_cap_percent or 0.0 for row in mine if row.delivery == ALL)
            gaps = [
                row.longest_gap_ms / row.implied_gap_ms
                for row in mine
                if row.longest_gap_ms and row.implied_gap_ms
            ]
            longest = f", longest gap {max(gaps):.1f} x what its share implies" if gaps else ""
            lines.append(
                f"{measured_by}: rates off by at most {off:.2f} %: "
                f"{_met(off <= RATE_GOAL_PERCENT)} (goal {RATE_GOAL_PERCENT:g} %); over the cap by "
                f"at most {over:.2f} % in any {1000 * WINDOW_S:.0f} ms: "
                f"{_met(over <= CAP_GOAL_PERCENT)} (goal {CAP_GOAL_PERCENT:g} %){longest}"
            )
        return lines


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def pacing_rows(
    measured_by: str, policy: str, deliveries: Sequence[Paced], scale: int
) -> list[PacingRow]:
    """A row for each delivery and one for all of them."""
    gbps = scale / BYTES_PER_GBIT
    rows = [_row(measured_by, policy, paced, gbps) for paced in deliveries]
    stamps = [stamp for paced in deliveries for stamp in paced.stamps]
    cap_gbps = WORKLOADS[WORKLOAD].cap_gbps
    most_gbps = most_in_window(stamps) / WINDOW_S * gbps
    rows.append(
        PacingRow(
            measured_by,
            policy,
            ALL,
            cap_gbps,
            most_gbps,
            None,
            over_cap_percent=max(0.0, 100 * (most_gbps / cap_gbps - 1)),
        )
    )
    return rows


def _row(measured_by: str, policy: str, paced: Paced, gbps: float) -> PacingRow:
    achieved, assigned = achieved_bytes_per_s(paced.stamps), paced.rate_bytes_per_s
    implied_ms = None
    if assigned and paced.fragment_bytes:
        implied_ms = 1000 * paced.fragment_bytes / assigned
    return PacingRow(
        measured_by,
        policy,
        paced.name,
        assigned * gbps if assigned else None,
        achieved * gbps,
        100 * (achieved / assigned - 1) if assigned else None,
        1000 * longest_gap_s(paced.stamps) if implied_ms else None,
        implied_ms,
    )


def _configuration(policy: PolicyName, scale: int) -> ScheduleConfiguration:
    return ScheduleConfiguration(
        policy=policy,
        cap_gbps=WORKLOADS[WORKLOAD].cap_gbps / scale,
        margin_gbps=MARGIN_GBPS / scale,
        epoch_s=EPOCH_S,
        rates=FOR_LIFE,
        layerwise_threshold_bytes=0,
    )


def _through(server: Served, requests: Sequence[ScaledRequest], policy: PolicyName) -> list[Paced]:
    """The same through the server, by when layers arrive in the client's memory."""
    cap_gbps = WORKLOADS[WORKLOAD].cap_gbps
    server.schedule(schedule(policy, cap_gbps, requests[0].scale, EPOCH_S))
    gpus = [server.gpu(request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        fetched = list(pool.map(server.prefill, requests, gpus))
    paced = []
    for request, one in zip(requests, fetched, strict=True):
        times_s = [one.started_s + at_s for at_s in itertools.accumulate(one.arrivals_s, max)]
        stamps = spread(times_s, request.layer_bytes)
        paced.append(Paced(request.paper.name, one.rate_bytes_per_s, stamps))
    return paced
