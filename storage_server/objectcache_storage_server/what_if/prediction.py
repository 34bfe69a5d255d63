"""What each policy would give the requests, if all of them began at once on an idle link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, get_args

from objectcache_schemas.policy_names import EVERY_EPOCH, FOR_LIFE, PolicyName, RatesName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lower_bound import least_delay_sum
from objectcache_storage_server.scheduling.rates.policies import RATE_POLICIES, assigned_rates
from objectcache_storage_server.scheduling.ttft_model import (
    added_ttft,
    stall_of_ttft,
    ttft_at_rate,
    ttft_of_arrivals,
)
from objectcache_storage_server.what_if.request_rows import Request
from objectcache_storage_server.what_if.simulation import layer_arrivals

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
BOUNDED_MAX = 8  # requests for which the lower bound is worth its seconds


@dataclass(frozen=True, slots=True)
class Link:
    """What the requests share. `alone_bytes_per_s` is the link that the TTFT of each is compared
    with, as if it were alone on it.
    """

    cap_bytes_per_s: float
    margin_bytes_per_s: float
    alone_bytes_per_s: float
    tenant_caps: Mapping[str, float] = field(default_factory=dict[str, float])


class RequestPrediction(NamedTuple):
    """One request. A rate that does not hold for life is the average until the last byte."""

    name: str
    rate_bytes_per_s: float
    ttft_s: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """All requests under one policy; rates that are not `are_for_life` are averages.

    `lower_bound_s` is what no schedule's `added_ttft_s` is less than; None for more than
    BOUNDED_MAX requests.
    """

    policy: str
    are_for_life: bool
    requests: tuple[RequestPrediction, ...]
    added_ttft_s: float
    lower_bound_s: float | None

    @property
    def total_ttft_s(self) -> float:
        """Of all requests."""
        return sum(request.ttft_s for request in self.requests)

    @property
    def total_stall_s(self) -> float:
        """Of all requests."""
        return sum(request.stall_s for request in self.requests)


def predict(
    policies: Sequence[PolicyName],
    requests: Sequence[Request],
    link: Link,
    rates: RatesName = EVERY_EPOCH,
) -> list[Prediction]:
    """One prediction a policy. Raises `InvalidRequest` where a simulation would take too long."""
    lower_bound_s = _lower_bound(requests, link)
    return [_predict(policy, requests, link, rates, lower_bound_s) for policy in policies]


def _predict(
    policy: PolicyName,
    requests: Sequence[Request],
    link: Link,
    rates: RatesName,
    lower_bound_s: float | None,
) -> Prediction:
    demands = [request.demand for request in requests]
    are_for_life = rates == FOR_LIFE and policy in RATE_POLICIES
    rates_and_ttfts = (_rated if are_for_life else _simulated)(policy, demands, link)
    predictions = tuple(
        RequestPrediction(request.name, rate, ttft_s, stall_of_ttft(request.demand, ttft_s))
        for request, (rate, ttft_s) in zip(requests, rates_and_ttfts, strict=True)
    )
    added_s = sum(
        added_ttft(demand, prediction.ttft_s, link.alone_bytes_per_s)
        for demand, prediction in zip(demands, predictions, strict=True)
    )
    return Prediction(policy, are_for_life, predictions, added_s, lower_bound_s)


def _rated(policy: PolicyName, demands: Sequence[Demand], link: Link) -> list[tuple[float, float]]:
    rates = assigned_rates(
        policy, demands, link.cap_bytes_per_s, link.margin_bytes_per_s, link.tenant_caps
    )
    return [(rate, ttft_at_rate(demand, rate)) for demand, rate in zip(demands, rates, strict=True)]


def _simulated(
    policy: PolicyName, demands: Sequence[Demand], link: Link
) -> list[tuple[float, float]]:
    all_arrivals_s = layer_arrivals(
        policy, demands, link.cap_bytes_per_s, link.tenant_caps, link.margin_bytes_per_s
    )
    return [
        (
            demand.payload_bytes / arrivals_s[-1],
            ttft_of_arrivals(arrivals_s, demand.compute_window_s or 0.0),
        )
        for demand, arrivals_s in zip(demands, all_arrivals_s, strict=True)
    ]


def _lower_bound(requests: Sequence[Request], link: Link) -> float | None:
    """Weights and tenants' caps left out, which can only make it lower."""
    if len(requests) > BOUNDED_MAX:
        return None
    demands = [replace(request.demand, weight=1.0) for request in requests]
    lower_s = least_delay_sum(demands, link.cap_bytes_per_s).lower_s
    alone_s = [ttft_at_rate(demand, link.alone_bytes_per_s) for demand in demands]
    return lower_s - sum(map(stall_of_ttft, demands, alone_s))
