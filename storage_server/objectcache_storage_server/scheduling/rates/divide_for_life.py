"""Rates for a delivery's life: the paper's "no redistribution" (section 3.6), read literally.

What is free at an epoch's end is divided among those who wait: of the cap, and of each tenant's
cap. A newcomer that would have to live with less than half of what an empty link would give it
waits for the next epochs, and those behind it go first if they fit. Whoever has waited for
`OVERTAKEN_S` is not overtaken any more; if only its tenant's cap is in its way, not by others of
its tenant.

A flow that has slept for long enough to be idle is left out: its rate is divided, and nobody is
compared with it, until it wakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.rates.divide_each_epoch import Division
from objectcache_storage_server.scheduling.rates.rated_pool import Pool, Rates

ADMIT_FRACTION = 0.5  # of the rate that an empty link would give: less is not worth a life with it
ADMITTED_MAX = 1024  # deliveries in one epoch
OVERTAKEN_S = 1.0  # a wait after which nobody that came later goes first
_ROUNDING = 1e-9  # of a tenant's cap


class ForLife(Division[JobT]):
    """Only those who wait get rates."""

    waits_for_an_end = True

    def __init__(self, pool: Pool[JobT]) -> None:
        super().__init__(pool)
        self._wanted: Rates[JobT] = {}  # of those an epoch looks at

    def concerns_anybody(self) -> bool:
        return bool(self._pool.waiting)

    def under_way(self) -> bool:
        return bool(self._wanted)

    def forget(self, flow: Flow[JobT]) -> None:
        self._wanted.pop(flow, None)

    def end(self, now_s: float) -> Rates[JobT]:
        """Find what those who wait should have: where nobody has a rate, they get it."""
        pool = self._pool
        pool.rated.leave_out_idle(now_s)
        running = pool.rated.not_idle()
        if pool.free <= 0:
            return {}
        left = self._tenants_left(running)
        waiting = [flow for flow in pool.waiting if self._may_have(flow, left)][:ADMITTED_MAX]
        beside = {flow: flow.demand for flow in (*running, *waiting)}
        rates = pool.rates(beside, pool.budget)
        found = {flow: rates[flow] for flow in waiting}
        if not running:
            return found
        self._wanted = found
        return {}

    def go_on(self, now_s: float) -> Rates[JobT]:
        """Divide what is free. Where somebody gets less than half of what it should have, the steps
        after this one try without those who want most; they wait for more.
        """
        pool = self._pool
        wanted, self._wanted = self._wanted, {}
        if pool.free <= 0:
            return {}
        left = self._tenants_left(pool.rated.not_idle())
        waiting = [flow for flow in wanted if self._may_have(flow, left)]
        found = pool.rates({flow: flow.demand for flow in waiting}, pool.free, left)
        lacking = [flow for flow in waiting if found[flow] < ADMIT_FRACTION * wanted[flow]]
        if not lacking:
            return found
        lacking.sort(key=wanted.__getitem__)  # of those who want the same the last to come is last
        dropped = set(lacking[len(lacking) // 2 :])
        gone = self._gone(waiting, dropped, self._tenants_full(found, left), now_s)
        self._wanted = {flow: wanted[flow] for flow in waiting if flow not in gone}
        return {}

    def _gone(
        self,
        waiting: list[Flow[JobT]],
        dropped: set[Flow[JobT]],
        full: set[str],
        now_s: float,
    ) -> set[Flow[JobT]]:
        """Who is not tried again: the dropped. But one of them that waits too long stays, and half
        of those that came after it go, as long as there are any.
        """
        behind: dict[str | None, list[Flow[JobT]]] = {}  # and the first; None: of all tenants
        for flow in waiting:
            tenant = flow.demand.tenant
            for key in (tenant, None):
                if key in behind:
                    behind[key].append(flow)
            if flow in dropped and now_s - self._pool.waiting[flow] >= OVERTAKEN_S:
                behind.setdefault(tenant if tenant in full else None, [flow])
        gone = set(dropped)
        for key in sorted(behind, key=lambda key: key is None):
            line = behind[key]
            if len(line) > 1:
                gone.difference_update(line)
                gone.update(line[1 + (len(line) - 1) // 2 :])
        return gone

    # --- tenants' caps ---

    def _tenants_left(self, running: Iterable[Flow[JobT]]) -> dict[str, float]:
        """Of each capped tenant's cap, what its running flows leave."""
        left = dict(self._pool.terms.tenant_caps)
        if left:
            for flow in running:
                if flow.demand.tenant in left:
                    left[flow.demand.tenant] -= flow.rate_bytes_per_s or 0.0
        return left

    def _may_have(self, flow: Flow[JobT], left: Mapping[str, float]) -> bool:
        tenant = flow.demand.tenant
        caps = self._pool.terms.tenant_caps
        return tenant not in left or left[tenant] > _ROUNDING * caps[tenant]

    def _tenants_full(
        self, found: Mapping[Flow[JobT], float], left: Mapping[str, float]
    ) -> set[str]:
        """Tenants that would use up what their cap leaves: the link is not what they lack."""
        used = dict.fromkeys(left, 0.0)
        for flow, rate in found.items():
            if flow.demand.tenant in used:
                used[flow.demand.tenant] += rate
        return {tenant for tenant, rate in used.items() if rate >= (1 - _ROUNDING) * left[tenant]}
