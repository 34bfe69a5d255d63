"""How an epoch's end divides the link: `scheduler.rates`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Generic

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.rates.policies import BY_WHAT_IS_LEFT
from objectcache_storage_server.scheduling.rates.rated_pool import Pool, Rates


class Division(ABC, Generic[JobT]):
    """Who gets which rate at an epoch's end. It may take several steps, so that none takes long:
    `end` is the first, and `go_on` the next while there is something `under_way`.
    """

    waits_for_an_end: ClassVar[bool]  # whoever comes to an idle link, for others that come with it

    def __init__(self, pool: Pool[JobT]) -> None:
        self._pool = pool

    @abstractmethod
    def concerns_anybody(self) -> bool:
        """Whether there is anybody that an epoch's end could give a rate."""

    def changes_by_itself(self) -> bool:
        """Whether an epoch's end finds other rates though nobody came, went, slept or woke."""
        return False

    @abstractmethod
    def end(self, now_s: float) -> Rates[JobT]:
        """Begin; returns what is certain already."""

    def under_way(self) -> bool:
        """Whether `go_on` has something to do."""
        return False

    def go_on(self, now_s: float) -> Rates[JobT]:
        """The next step; returns what it found."""
        return {}

    def forget(self, flow: Flow[JobT]) -> None:
        """The flow has its rate, or is gone."""


class EveryEpoch(Division[JobT]):
    """All that have something to send divide the link anew, whatever rates they have."""

    waits_for_an_end = False

    def concerns_anybody(self) -> bool:
        return bool(self._pool.waiting or self._pool.rated.flows)

    def changes_by_itself(self) -> bool:
        pool = self._pool  # whose rates add up to 0, exactly, where nobody uses one
        return pool.terms.policy in BY_WHAT_IS_LEFT and pool.rated.rate_bytes_per_s > 0

    def end(self, now_s: float) -> Rates[JobT]:
        """Those that are idle keep what they have until they wake, and the others count on it."""
        pool = self._pool
        pool.rated.leave_out_idle(now_s)
        flows = [*pool.rated.not_idle(), *pool.waiting]
        if pool.terms.policy in BY_WHAT_IS_LEFT:
            demands = {flow: flow.left for flow in flows}
        else:
            demands = {flow: flow.demand for flow in flows}
        rates = pool.rates(demands, pool.budget)
        return {flow: rate for flow, rate in rates.items() if rate != flow.rate_bytes_per_s}
