"""Rows of figure 16: what was measured beside the overlap model, the lower bound and the paper.

A policy is run several times. What a request took is the median of its runs, what all took the
median of the runs' sums.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures.paper_data import (
    LINK_GBPS,
    MARGIN_GBPS,
    RATE_POLICIES,
    WORKLOADS,
    PaperWorkload,
)
from benchmarks.figures.scaled import ScaledRequest
from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_schemas.policy_names import FOR_LIFE, PolicyName
from objectcache_storage_server.what_if.prediction import Link, Prediction, predict
from objectcache_storage_server.what_if.request_rows import Request

DYNAMIC: PolicyName = "stall_dynamic"
CALIBRATED: PolicyName = "calibrated_stall_opt"
EQUAL: PolicyName = "equal"
POLICIES = (*RATE_POLICIES, DYNAMIC)
ALL = "all"
BOUND = "lower bound"
RATE_GOAL = 0.03  # of what was assigned
SAME_RATE = 0.01


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One request under one policy, or all of them; rates are multiplied back to the paper's."""

    workload: str
    policy: str
    request: str
    ttft_ms: float | None = None
    base_ms: float | None = None
    added_ms: float | None = None
    model_added_ms: float | None = None  # by the overlap model
    paper_added_ms: float | None = None
    below_equal: float | None = None  # equal's added time over this one's
    paper_below_equal: float | None = None
    assigned_gbps: float | None = None
    achieved_gbps: float | None = None
    paper_gbps: float | None = None
    paper_ttft_ms: float | None = None
    samples: int = 1
    spread_ms: float | None = None  # of TTFT, between the least and the most of the samples
    off_percent: float | None = None  # achieved less assigned rate, the worst of the samples
    reruns: int = 0  # runs that were not taken
    is_together: bool = True  # all were admitted in one epoch
    is_on_rate: bool = True  # all achieved what they were assigned


@dataclass(frozen=True, slots=True)
class Measured:
    """One request, by its policy."""

    ttft_s: float
    rate_bytes_per_s: float | None
    achieved_bytes_per_s: float | None

    @property
    def off(self) -> float:
        """How far the achieved rate is from the assigned one, as a part of it; 0 without one."""
        if not self.rate_bytes_per_s or self.achieved_bytes_per_s is None:
            return 0.0
        return self.achieved_bytes_per_s / self.rate_bytes_per_s - 1


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of a workload, once; `expected` are the rates of all admitted together."""

    requests: tuple[Measured, ...]
    expected: tuple[float, ...] | None = None

    @property
    def is_together(self) -> bool:
        """Whether everybody was assigned the rate that it gets when all are admitted together."""
        return self.expected is None or all(
            abs((one.rate_bytes_per_s or 0) - rate) <= SAME_RATE * rate
            for one, rate in zip(self.requests, self.expected, strict=True)
        )

    @property
    def worst_off(self) -> float:
        """Of the request whose achieved rate is farthest from what it was assigned."""
        return max((one.off for one in self.requests), key=abs)

    @property
    def is_on_rate(self) -> bool:
        """Whether everybody achieved what it was assigned."""
        return abs(self.worst_off) <= RATE_GOAL

    @property
    def ttft_s(self) -> float:
        """Of all requests."""
        return sum(one.ttft_s for one in self.requests)


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a policy that are taken, one at least, and how many were not."""

    taken: tuple[Run, ...]
    reruns: int = 0

    @property
    def ttft_s(self) -> float:
        """Of all requests, the median run's."""
        return statistics.median(run.ttft_s for run in self.taken)

    def of_request(self, index: int) -> list[Measured]:
        """One request in every run."""
        return [run.requests[index] for run in self.taken]


def taken(runs: Sequence[Run], wanted: int) -> Runs:
    """The first good runs; the best one, which its row points out, where none is good."""
    good = [run for run in runs if run.is_together and run.is_on_rate][:wanted]
    if not good:
        good = [min(runs, key=lambda run: (not run.is_together, abs(run.worst_off)))]
    return Runs(tuple(good), len(runs) - len(good))


def predicted(
    paper: PaperWorkload, requests: Sequence[ScaledRequest], policy: PolicyName, scale: int
) -> Prediction:
    """By the overlap model."""
    link = Link(
        paper.cap_gbps / scale * BYTES_PER_GBIT,
        MARGIN_GBPS / scale * BYTES_PER_GBIT,
        LINK_GBPS / scale * BYTES_PER_GBIT,
    )
    named = [Request(request.paper.name, request.demand) for request in requests]
    return predict([policy], named, link, FOR_LIFE)[0]


def workload_rows(
    name: str,
    requests: Sequence[ScaledRequest],
    measured: Mapping[PolicyName, Runs],
    bases_s: Mapping[str, Mapping[str, float]],
    scale: int,
) -> list[WorkloadRow]:
    """The rows of a workload, measured under each policy, `equal` among them.

    `bases_s` is by policy and request.
    """
    paper = WORKLOADS[name]
    base_ms = {
        policy: 1000 * sum(bases_s[policy][request.paper.name] for request in requests)
        for policy in measured
    }
    total_ms = {policy: 1000 * runs.ttft_s for policy, runs in measured.items()}
    added_ms = {policy: total_ms[policy] - base_ms[policy] for policy in measured}
    rows: list[WorkloadRow] = []
    for policy, runs in measured.items():
        column = RATE_POLICIES.index(policy) if policy in RATE_POLICIES else None
        model = predicted(paper, requests, policy, scale)
        for index, request in enumerate(requests):
            samples, base_s = runs.of_request(index), bases_s[policy][request.paper.name]
            rows.append(_request_row(name, policy, request, samples, base_s, scale, column))
        rows.append(
            WorkloadRow(
                name,
                policy,
                ALL,
                total_ms[policy],
                base_ms[policy],
                added_ms[policy],
                1000 * model.added_ttft_s,
                None if column is None else paper.added_ttft_ms[column],
                added_ms[EQUAL] / added_ms[policy],
                None if column is None else paper.added_ttft_ms[0] / paper.added_ttft_ms[column],
                samples=len(runs.taken),
                spread_ms=_spread_ms([run.ttft_s for run in runs.taken]),
                off_percent=_worst_off_percent([run.worst_off for run in runs.taken]),
                reruns=runs.reruns,
                is_together=all(run.is_together for run in runs.taken),
                is_on_rate=all(run.is_on_rate for run in runs.taken),
            )
        )
    bound = predicted(paper, requests, DYNAMIC, scale).lower_bound_s
    assert bound is not None
    rows.append(WorkloadRow(name, BOUND, ALL, model_added_ms=1000 * bound))
    return rows


def _request_row(
    name: str,
    policy: str,
    request: ScaledRequest,
    samples: Sequence[Measured],
    base_s: float,
    scale: int,
    column: int | None,
) -> WorkloadRow:
    paper = WORKLOADS[name]
    gbps = scale / BYTES_PER_GBIT
    ttft_s = statistics.median(one.ttft_s for one in samples)
    assigned, achieved = samples[0].rate_bytes_per_s, _median_achieved(samples)
    return WorkloadRow(
        workload=name,
        policy=policy,
        request=request.paper.name,
        ttft_ms=1000 * ttft_s,
        base_ms=1000 * base_s,
        added_ms=1000 * (ttft_s - base_s),
        assigned_gbps=None if assigned is None else assigned * gbps,
        achieved_gbps=None if achieved is None else achieved * gbps,
        paper_gbps=None if column is None else paper.rates_gbps[request.paper.name][column],
        paper_ttft_ms=None if column is None else paper.ttft_ms[request.paper.name][column],
        samples=len(samples),
        spread_ms=_spread_ms([one.ttft_s for one in samples]),
        off_percent=_worst_off_percent([one.off for one in samples]) if assigned else None,
        is_on_rate=all(abs(one.off) <= RATE_GOAL for one in samples),
    )


def _median_achieved(samples: Sequence[Measured]) -> float | None:
    known = [one.achieved_bytes_per_s for one in samples if one.achieved_bytes_per_s is not None]
    return statistics.median(known) if known else None


def _spread_ms(times_s: Sequence[float]) -> float | None:
    return 1000 * (max(times_s) - min(times_s)) if len(times_s) > 1 else None


def _worst_off_percent(offs: Sequence[float]) -> float:
    return 100 * max(offs, key=abs)
