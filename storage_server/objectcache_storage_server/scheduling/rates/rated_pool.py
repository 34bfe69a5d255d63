"""The pool under a policy that assigns rates: who has one, who waits, and what they divide."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple

from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.nic_paces import Destination
from objectcache_storage_server.scheduling.lanes.rate_lane import RateLane
from objectcache_storage_server.scheduling.lanes.split_link import Sides
from objectcache_storage_server.scheduling.rates.policies import assigned_rates
from objectcache_storage_server.scheduling.schedule_terms import Terms

Rates = dict[Flow[JobT], float]  # bytes per second


class Caps(NamedTuple):
    """What a tenant, and a NIC, may have together, bytes per second; no entry is no cap."""

    tenants: Mapping[str, float]
    nics: Mapping[Destination, float]


class Pool(Generic[JobT]):
    """`terms` are set before everything else."""

    terms: Terms

    def __init__(self, rated: RateLane[JobT], sides: Sides) -> None:
        """`rated` are those that have a rate; `sides` says how much is not for those with rates."""
        self.rated = rated
        self._sides = sides
        self.waiting: dict[Flow[JobT], float] = {}  # since when, in order of arrival

    @property
    def budget(self) -> float:
        """What the policy may divide: the cap, less a fair share for those that have no rates."""
        return self.terms.cap_bytes_per_s * self._sides.pool_share

    @property
    def free(self) -> float:
        """Of the budget, what nobody has; below 0 where more than that was given."""
        return self.budget - self.rated.rate_bytes_per_s

    def caps(self, flows: Iterable[Flow[JobT]]) -> Caps:
        """Of all tenants, and of the NICs that these flows go to."""
        nics = {flow.destination: flow.nic for flow in flows if flow.nic}
        limits = {one: nic.pool_bytes_per_s for one, nic in nics.items() if nic.rate < math.inf}
        return Caps(self.terms.tenant_caps, limits)

    def rates(
        self,
        demands: Mapping[Flow[JobT], Demand],
        budget: float,
        caps: Caps | None = None,
    ) -> Rates[JobT]:
        """Of each flow, if these divided the budget; the tenants' and the NICs' whole caps, if none
        are given.
        """
        if caps is None:
            caps = self.caps(demands)
        found = assigned_rates(
            self.terms.policy,
            list(demands.values()),
            budget,
            self.terms.margin_bytes_per_s,
            caps.tenants,
            caps.nics,
        )
        return dict(zip(demands, found, strict=True))

    def __repr__(self) -> str:
        return f"<Pool {len(self.rated.flows)} with a rate, {len(self.waiting)} waiting>"
