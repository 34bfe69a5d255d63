"""Epochs: when deliveries get their rates, and which (paper, section 3.6).

Whoever comes waits for the end of an epoch. What is free then is divided among those who wait: of
the cap, and of each tenant's cap. A newcomer that would have to live with less than half of what an
empty link would give it waits for the next epochs, and those behind it go first if they fit.
Whoever has waited for `OVERTAKEN_S` is not overtaken any more; if only its tenant's cap is in its
way, not by others of its tenant.

A flow that has slept for long enough to be idle is left out: its rate is divided, and nobody is
compared with it, until it wakes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Generic

from objectcache_storage_server.scheduling.flow import Flow, JobT
from objectcache_storage_server.scheduling.policies import assigned_rates
from objectcache_storage_server.scheduling.rate_lane import RateLane
from objectcache_storage_server.scheduling.sides import Sides
from objectcache_storage_server.scheduling.terms import Terms

ADMIT_FRACTION = 0.5  # of the rate that an empty link would give: less is not worth a life with it
ADMITTED_MAX = 1024  # deliveries in one epoch
STARTED_MAX = 32  # of them in one decision, so that none takes long
OVERTAKEN_S = 1.0  # a wait after which nobody that came later goes first
_ROUNDING = 1e-9  # of a tenant's cap


class Epochs(Generic[JobT]):
    """Flows that wait for a rate, until `admit` gives it to them.

    `configure` comes before everything else. The flows that `admit` and `assign_anew` return no
    longer wait; the caller adds them to the lane of those with rates, if they are not in it.
    """

    def __init__(self, rated: RateLane[JobT], sides: Sides) -> None:
        """`rated` are those that have a rate; `sides` says how much is not for those with rates."""
        self._rated = rated
        self._sides = sides
        self._waiting: dict[Flow[JobT], float] = {}  # since when, in order of arrival
        self._wanted: dict[Flow[JobT], float] = {}  # rates of those an epoch looks at
        self._found: dict[Flow[JobT], float] = {}  # of those who begin in the next decisions
        self._anew: list[Flow[JobT]] = []  # who gets another rate, whatever it has
        self._anew_awake: list[Flow[JobT]] = []  # of those, who is not idle where others are
        self._next_end_s = -math.inf
        self._may_admit = False  # something has changed since the last epoch

    def __len__(self) -> int:
        return len(self._waiting)

    # --- what changes ---

    def configure(self, terms: Terms, now_s: float) -> None:
        """Other terms from now on."""
        self._terms = terms
        self._next_end_s = now_s
        self._may_admit = True
        self._wanted, self._found = {}, {}
        self._anew, self._anew_awake = [], []

    def join(self, flow: Flow[JobT], now_s: float) -> None:
        """The flow waits for a rate."""
        if not self._waiting:  # whoever comes within an epoch of it is admitted with it
            self._next_end_s = max(self._next_end_s, now_s + self._terms.epoch_s)
        self._may_admit = True
        flow.is_waiting = True
        self._waiting[flow] = now_s

    def discard(self, flow: Flow[JobT]) -> None:
        """The flow has ended, whether it was waiting or not: there may be more to divide."""
        self._may_admit = True
        self._forget(flow)

    def _forget(self, flow: Flow[JobT]) -> None:
        flow.is_waiting = False
        self._waiting.pop(flow, None)
        self._wanted.pop(flow, None)
        self._found.pop(flow, None)
        for them in (self._anew, self._anew_awake):
            if flow in them:
                them.remove(flow)

    # --- who begins ---

    def next_at_s(self, now_s: float) -> float:
        """When `admit` has something to do; infinity: before something changes."""
        if self._found or self._wanted or self._anew:
            return now_s
        if not self._waiting:
            return math.inf
        return self._next_end_s if self._may_admit else max(self._next_end_s, self._rated.idle_at_s)

    def admit(self, now_s: float) -> list[tuple[Flow[JobT], float]]:
        """Who begins now, and at which rate. An epoch's end takes several calls, so that none takes
        long: each computes rates once, or starts a few.
        """
        if self._anew or self._anew_awake:
            self._assign_some(now_s)
        elif self._found:
            return self._first_found()
        elif self._wanted:
            self._divide_what_is_free(now_s)
        elif now_s >= self.next_at_s(now_s):
            self._end(now_s)
        return []

    def assign_anew(self, now_s: float) -> list[tuple[Flow[JobT], float]]:
        """The same for everybody, those who have a rate included, and without waiting for an
        epoch's end: the link is divided as if it were empty. Of many `admit` does it.
        """
        self._rated.count_idle()
        self._anew = [*self._rated.flows, *self._waiting]
        if len(self._anew) > STARTED_MAX:
            return []
        while self._anew or self._anew_awake:
            self._assign_some(now_s)
        return self._first_found()

    def _assign_some(self, now_s: float) -> None:
        """Rates of everybody; then, if some are idle, of the others without them."""
        if everybody := self._anew:
            self._anew = []
            self._found = self._rates_beside([], everybody, self._budget())
            awake = [flow for flow in everybody if not flow.is_idle(now_s)]
            self._anew_awake = awake if len(awake) < len(everybody) else []
        else:
            awake, self._anew_awake = self._anew_awake, []
            self._found |= self._rates_beside([], awake, self._budget())

    def _first_found(self) -> list[tuple[Flow[JobT], float]]:
        begin = list(itertools.islice(self._found.items(), STARTED_MAX))
        for flow, _ in begin:
            self._forget(flow)
        return begin

    def _end(self, now_s: float) -> None:
        """Find what those who wait should have: where nobody has a rate, they get it."""
        self._may_admit = False
        self._next_end_s = now_s + self._terms.epoch_s
        self._rated.leave_out_idle(now_s)
        running = self._rated.not_idle()
        budget = self._budget()
        if budget - self._rated.rate_bytes_per_s <= 0:
            return
        left = self._tenants_left(running)
        waiting = [flow for flow in self._waiting if self._may_have(flow, left)]
        found = self._rates_beside(running, waiting[:ADMITTED_MAX], budget)
        if running:
            self._wanted = found
        else:
            self._found = found

    def _divide_what_is_free(self, now_s: float) -> None:
        """Where somebody gets less than half of what it should have, the decisions after this one
        try without those who want most; they wait for more.
        """
        wanted, self._wanted = self._wanted, {}
        free = self._budget() - self._rated.rate_bytes_per_s
        if free <= 0:
            return
        left = self._tenants_left(self._rated.not_idle())
        waiting = [flow for flow in wanted if self._may_have(flow, left)]
        found = self._rates_beside([], waiting, free, left)
        lacking = [flow for flow in waiting if found[flow] < ADMIT_FRACTION * wanted[flow]]
        if not lacking:
            self._found = found
            self._may_admit = self._may_admit or 0 < len(found) < len(self._waiting)
            return
        lacking.sort(key=wanted.__getitem__)  # of those who want the same the last to come is last
        dropped = set(lacking[len(lacking) // 2 :])
        gone = self._gone(waiting, dropped, self._tenants_full(found, left), now_s)
        self._wanted = {flow: wanted[flow] for flow in waiting if flow not in gone}

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
            if flow in dropped and now_s - self._waiting[flow] >= OVERTAKEN_S:
                behind.setdefault(tenant if tenant in full else None, [flow])
        gone = set(dropped)
        for key in sorted(behind, key=lambda key: key is None):
            line = behind[key]
            if len(line) > 1:
                gone.difference_update(line)
                gone.update(line[1 + (len(line) - 1) // 2 :])
        return gone

    # --- what there is ---

    def _tenants_left(self, running: list[Flow[JobT]]) -> dict[str, float]:
        """Of each capped tenant's cap, what its running flows leave."""
        left = dict(self._terms.tenant_caps)
        if left:
            for flow in running:
                if flow.demand.tenant in left:
                    left[flow.demand.tenant] -= flow.rate_bytes_per_s or 0.0
        return left

    def _may_have(self, flow: Flow[JobT], left: Mapping[str, float]) -> bool:
        tenant = flow.demand.tenant
        return tenant not in left or left[tenant] > _ROUNDING * self._terms.tenant_caps[tenant]

    def _tenants_full(
        self, found: Mapping[Flow[JobT], float], left: Mapping[str, float]
    ) -> set[str]:
        """Tenants that would use up what their cap leaves: the link is not what they lack."""
        used = dict.fromkeys(left, 0.0)
        for flow, rate in found.items():
            if flow.demand.tenant in used:
                used[flow.demand.tenant] += rate
        return {tenant for tenant, rate in used.items() if rate >= (1 - _ROUNDING) * left[tenant]}

    def _budget(self) -> float:
        """What the policy may divide: the cap, less a fair share for those that have no rates."""
        return self._terms.cap_bytes_per_s * self._sides.pool_share

    def _rates_beside(
        self,
        running: list[Flow[JobT]],
        waiting: list[Flow[JobT]],
        budget: float,
        tenant_caps: Mapping[str, float] | None = None,
    ) -> dict[Flow[JobT], float]:
        """Of those who wait, if all of them divided the budget; the tenants' whole caps, if none
        are given.
        """
        rates = assigned_rates(
            self._terms.policy,
            [flow.demand for flow in (*running, *waiting)],
            budget,
            self._terms.margin_bytes_per_s,
            self._terms.tenant_caps if tenant_caps is None else tenant_caps,
        )
        return dict(zip(waiting, rates[len(running) :], strict=True))

    def __repr__(self) -> str:
        return f"<Epochs {len(self)} waiting>"
