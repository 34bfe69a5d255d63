"""Rows of figure 16: what was measured beside the overlap model, the lower bound and the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures.paper_data import (
    LINK_GBPS,
    MARGIN_GBPS,
    RATE_POLICIES,
    WORKLOADS,
    PaperWorkload,
)
from benchmarks.figures.scaled import BYTES_PER_S_PER_GBPS, ScaledRequest
from objectcache_schemas.schedule import PolicyName
from objectcache_storage_server.what_if.prediction import Link, Prediction, predict
from objectcache_storage_server.what_if.request_rows import Request

DYNAMIC: PolicyName = "stall_dynamic"
CALIBRATED: PolicyName = "calibrated_stall_opt"
EQUAL: PolicyName = "equal"
POLICIES = (*RATE_POLICIES, DYNAMIC)
ALL = "all"
BOUND = "lower bound"


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
    is_together: bool = True  # all were admitted in one epoch


@dataclass(frozen=True, slots=True)
class Measured:
    """One request, by its policy."""

    ttft_s: float
    rate_bytes_per_s: float | None
    achieved_bytes_per_s: float | None
    is_together: bool = True


def predicted(
    paper: PaperWorkload, requests: Sequence[ScaledRequest], policy: str, scale: int
) -> Prediction:
    """By the overlap model."""
    link = Link(
        paper.cap_gbps / scale * BYTES_PER_S_PER_GBPS,
        MARGIN_GBPS / scale * BYTES_PER_S_PER_GBPS,
        LINK_GBPS / scale * BYTES_PER_S_PER_GBPS,
    )
    named = [Request(request.paper.name, request.demand) for request in requests]
    return predict([policy], named, link)[0]


def workload_rows(
    name: str,
    requests: Sequence[ScaledRequest],
    measured: Mapping[str, Sequence[Measured]],
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
    total_ms = {policy: 1000 * sum(one.ttft_s for one in ms) for policy, ms in measured.items()}
    added_ms = {policy: total_ms[policy] - base_ms[policy] for policy in measured}
    rows: list[WorkloadRow] = []
    for policy, of_policy in measured.items():
        column = RATE_POLICIES.index(policy) if policy in RATE_POLICIES else None
        model = predicted(paper, requests, policy, scale)
        for request, one in zip(requests, of_policy, strict=True):
            rows.append(_request_row(name, policy, request, one, bases_s[policy], scale, column))
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
                is_together=all(one.is_together for one in of_policy),
            )
        )
    bound = model.lower_bound_s
    assert bound is not None
    rows.append(WorkloadRow(name, BOUND, ALL, model_added_ms=1000 * bound))
    return rows


def _request_row(
    name: str,
    policy: str,
    request: ScaledRequest,
    one: Measured,
    bases_s: Mapping[str, float],
    scale: int,
    column: int | None,
) -> WorkloadRow:
    paper = WORKLOADS[name]
    gbps = scale / BYTES_PER_S_PER_GBPS
    base_s = bases_s[request.paper.name]
    return WorkloadRow(
        workload=name,
        policy=policy,
        request=request.paper.name,
        ttft_ms=1000 * one.ttft_s,
        base_ms=1000 * base_s,
        added_ms=1000 * (one.ttft_s - base_s),
        assigned_gbps=None if one.rate_bytes_per_s is None else one.rate_bytes_per_s * gbps,
        achieved_gbps=None if one.achieved_bytes_per_s is None else one.achieved_bytes_per_s * gbps,
        paper_gbps=None if column is None else paper.rates_gbps[request.paper.name][column],
        paper_ttft_ms=None if column is None else paper.ttft_ms[request.paper.name][column],
        is_together=one.is_together,
    )
