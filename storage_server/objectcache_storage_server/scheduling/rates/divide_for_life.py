"""Rates for a delivery's life: the paper's "no redistribution" (section 3.6), read literally.

What is free at an epoch's end is divided among those who wait: of the cap, of each tenant's cap,
and of what each storage NIC carries. A newcomer that would have to live with less than half of what
an empty link would give it waits for the next epochs, and those behind it go first if they fit.
Whoever has waited for `OVERTAKEN_S` is not overtaken any more; if only its tenant's cap or its NIC
is in its way, not by others of its tenant, or to its NIC.

A flow that has slept for long enough to be idle is left out: its rate is divided, and nobody is
compared with it, until it wakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.nic_paces import Destination
from objectcache_storage_server.scheduling.rates.divide_each_epoch import Division
from objectcache_storage_server.scheduling.rates.rated_pool import Caps, Pool, Rates

ADMIT_FRACTION = 0.5  # of the rate that an empty link would give: less is not worth a life with it
ADMITTED_MAX = 1024  # deliveries in one epoch
OVERTAKEN_S = 1.0  # a wait after which nobody that came later goes first
_ROUNDING = 1e-9  # of a cap


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
        whole = pool.caps((*running, *pool.waiting))
        left = self._left(running, whole)
        waiting = [flow for flow in pool.waiting if _may_have(flow, left, whole)][:ADMITTED_MAX]
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
        running = pool.rated.not_idle()
        whole = pool.caps((*running, *wanted))
        left = self._left(running, whole)
        waiting = [flow for flow in wanted if _may_have(flow, left, whole)]
        found = pool.rates({flow: flow.demand for flow in waiting}, pool.free, left)
        lacking = [flow for flow in waiting if found[flow] < ADMIT_FRACTION * wanted[flow]]
        if not lacking:
            return found
        lacking.sort(key=wanted.__getitem__)  # of those who want the same the last to come is last
        dropped = set(lacking[len(lacking) // 2 :])
        gone = self._gone(waiting, dropped, _full(found, left), now_s)
        self._wanted = {flow: wanted[flow] for flow in waiting if flow not in gone}
        return {}

    def _gone(
        self,
        waiting: list[Flow[JobT]],
        dropped: set[Flow[JobT]],
        full: set[str | Destination],
        now_s: float,
    ) -> set[Flow[JobT]]:
        """Who is not tried again: the dropped. But one of them that waits too long stays, and half
        of those that came after it go, as long as there are any.
        """
        # And the first; None: of all tenants.
        behind: dict[str | Destination | None, list[Flow[JobT]]] = {}
        for flow in waiting:
            owners = flow.destination, flow.demand.tenant
            for key in (*owners, None):
                if key in behind:
                    behind[key].append(flow)
            if flow in dropped and now_s - self._pool.waiting[flow] >= OVERTAKEN_S:
                behind.setdefault(next((owner for owner in owners if owner in full), None), [flow])
        gone = set(dropped)
        for key in sorted(behind, key=lambda key: key is None):
            line = behind[key]
            if len(line) > 1:
                gone.difference_update(line)
                gone.update(line[1 + (len(line) - 1) // 2 :])
        return gone

    def _left(self, running: Iterable[Flow[JobT]], whole: Caps) -> Caps:
        """Of each cap, what the running flows leave."""
        tenants, nics = dict(whole.tenants), dict(whole.nics)
        if tenants or nics:
            for flow in running:
                rate_bytes_per_s = flow.rate_bytes_per_s or 0.0
                if flow.demand.tenant in tenants:
                    tenants[flow.demand.tenant] -= rate_bytes_per_s
                if flow.destination in nics:
                    nics[flow.destination] -= rate_bytes_per_s
        return Caps(tenants, nics)


def _may_have(flow: Flow[JobT], left: Caps, whole: Caps) -> bool:
    """Whether its tenant's cap and its NIC leave it anything."""
    tenant, destination = flow.demand.tenant, flow.destination
    if tenant in left.tenants and left.tenants[tenant] <= _ROUNDING * whole.tenants[tenant]:
        return False
    if destination not in left.nics:
        return True
    return left.nics[destination] > _ROUNDING * whole.nics[destination]


def _full(found: Mapping[Flow[JobT], float], left: Caps) -> set[str | Destination]:
    """Tenants that would use up what their cap leaves, and NICs that would be full: the link is not
    what their flows lack.
    """
    tenants, nics = dict.fromkeys(left.tenants, 0.0), dict.fromkeys(left.nics, 0.0)
    for flow, rate in found.items():
        if flow.demand.tenant in tenants:
            tenants[flow.demand.tenant] += rate
        if flow.destination in nics:
            nics[flow.destination] += rate
    return {one for one, rate in tenants.items() if rate >= (1 - _ROUNDING) * left.tenants[one]} | {
        one for one, rate in nics.items() if rate >= (1 - _ROUNDING) * left.nics[one]
    }
