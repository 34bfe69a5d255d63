"""The pool under a policy that assigns rates: who has one, who waits, and what they divide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic

from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.rate_lane import RateLane
from objectcache_storage_server.scheduling.lanes.split_link import Sides
from objectcache_storage_server.scheduling.rates.policies import assigned_rates
from objectcache_storage_server.scheduling.schedule_terms import Terms

Rates = dict[Flow[JobT], float]  # bytes per second


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

    def rates(
        self,
        demands: Mapping[Flow[JobT], Demand],
        budget: float,
        tenant_caps: Mapping[str, float] | None = None,
    ) -> Rates[JobT]:
        """Of each flow, if these divided the budget; the tenants' whole caps, if none are given."""
        found = assigned_rates(
            self.terms.policy,
            list(demands.values()),
            budget,
            self.terms.margin_bytes_per_s,
            self.terms.tenant_caps if tenant_caps is None else tenant_caps,
        )
        return dict(zip(demands, found, strict=True))

    def __repr__(self) -> str:
        return f"<Pool {len(self.rated.flows)} with a rate, {len(self.waiting)} waiting>"
