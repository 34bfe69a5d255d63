"""What a simulated schedule cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from objectcache_storage_server.simulation.arrivals import Arrival
from objectcache_storage_server.simulation.machine import Machine, SimulatedClient
from objectcache_storage_server.simulation.run import Outcome

STALLED_FRACTION = 0.01  # of the TTFT alone: what is added beyond it counts as a stall


@dataclass(frozen=True, slots=True)
class Fairness:
    """Between tenants that were served. Jain's index is 1 where all have the same mean added TTFT,
    and 1/n where one of n has all of it.
    """

    tenants: int
    jain: float
    worst_tenant: str
    worst_mean_added_s: float


@dataclass(frozen=True, slots=True)
class TenantMeasures:
    """A tenant that has a share of its own."""

    tenant: str
    served: int
    slow_downs: int
    added_mean_s: float


@dataclass(frozen=True, slots=True)
class Measures:
    """One policy at one load. Added TTFT is that over the request alone on an idle link.

    `offered_utilisation` is the bytes that are asked for in a second over those the link carries;
    None where all requests come at once.
    """

    policy: str
    load: float
    requests: int
    served: int
    slow_downs: int
    added_mean_s: float
    added_p50_s: float
    added_p99_s: float
    stalled: float  # fraction of those served
    offered_utilisation: float | None
    link_utilisation: float
    fairness: Fairness | None
    events: int
    tenants: tuple[TenantMeasures, ...] = ()


def measure(
    policy: str,
    load: float,
    arrivals: Sequence[Arrival],
    machine: Machine,
    outcome: Outcome,
    tenants: Collection[str] = (),
) -> Measures:
    """Of all requests that were served; where none was, the times are 0. `tenants` are those that
    are measured each for itself.
    """
    alone_s = np.array([machine.alone_ttft_s(client.arrival) for client in outcome.clients])
    added_s = np.array([client.ttft_s for client in outcome.clients]) - alone_s
    span_s = outcome.end_s - arrivals[0].at_s
    has_tenants = any(arrival.tenant for arrival in arrivals)
    p50_s, p99_s = np.percentile(added_s, [50, 99]) if len(added_s) else (0.0, 0.0)
    return Measures(
        policy=policy,
        load=load,
        requests=len(arrivals),
        served=len(outcome.clients),
        slow_downs=len(outcome.refused),
        added_mean_s=float(added_s.mean()) if len(added_s) else 0.0,
        added_p50_s=float(p50_s),
        added_p99_s=float(p99_s),
        stalled=float((added_s > STALLED_FRACTION * alone_s).mean()) if len(added_s) else 0.0,
        offered_utilisation=offered_utilisation(arrivals, machine),
        link_utilisation=outcome.sent_bytes / machine.alone_bytes_per_s / span_s if span_s else 0.0,
        fairness=_fairness(outcome.clients, added_s.tolist()) if has_tenants else None,
        events=outcome.events,
        tenants=tuple(_tenant(tenant, outcome, added_s.tolist()) for tenant in tenants),
    )


def offered_utilisation(arrivals: Sequence[Arrival], machine: Machine) -> float | None:
    """See `Measures`. The last request ends the span, so it does not count."""
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    asked_bytes = sum(machine.demand(arrival).payload_bytes for arrival in arrivals[:-1])
    return asked_bytes / machine.alone_bytes_per_s / span_s if span_s else None


def _tenant(tenant: str, outcome: Outcome, added_s: Sequence[float]) -> TenantMeasures:
    own_s = [
        one_s
        for client, one_s in zip(outcome.clients, added_s, strict=True)
        if client.arrival.tenant == tenant
    ]
    refused = sum(arrival.tenant == tenant for arrival in outcome.refused)
    return TenantMeasures(tenant, len(own_s), refused, sum(own_s) / len(own_s) if own_s else 0.0)


def _fairness(clients: Sequence[SimulatedClient], added_s: Sequence[float]) -> Fairness | None:
    by_tenant: dict[str, list[float]] = {}
    for client, one_s in zip(clients, added_s, strict=True):
        by_tenant.setdefault(client.arrival.tenant, []).append(max(0.0, one_s))
    if not by_tenant:
        return None
    means = {tenant: sum(all_s) / len(all_s) for tenant, all_s in by_tenant.items()}
    worst = max(means, key=means.__getitem__)
    return Fairness(len(means), jain_index(list(means.values())), worst, means[worst])


def jain_index(shares: Sequence[float]) -> float:
    """The square of the sum over n times the sum of the squares; 1.0 where all are 0."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0
