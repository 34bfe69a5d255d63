"""Epochs: when deliveries get their rates (paper, section 3.6).

Rates are worked out at the end of an epoch, if something has changed: somebody came, went, fell
asleep or woke. `divide_each_epoch` and `divide_for_life` say who gets one then, and over what.
"""

from __future__ import annotations

import itertools
import math
from typing import Generic

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.rate_lane import RateLane
from objectcache_storage_server.scheduling.lanes.split_link import Sides
from objectcache_storage_server.scheduling.rates.divide_each_epoch import Division, EveryEpoch
from objectcache_storage_server.scheduling.rates.divide_for_life import ForLife
from objectcache_storage_server.scheduling.rates.rated_pool import Pool, Rates
from objectcache_storage_server.scheduling.schedule_terms import Terms

STARTED_MAX = 32  # flows in one decision, so that none takes long


class Epochs(Generic[JobT]):
    """Flows that wait for a rate, until `admit` gives it to them, and those that get another.

    `configure` comes before everything else. The flows that `admit` and `assign_anew` return do not
    wait any longer; the caller adds them to the lane of those with rates, if they are not in it.
    """

    def __init__(self, rated: RateLane[JobT], sides: Sides) -> None:
        """`rated` are those that have a rate; `sides` says how much is not for those with rates."""
        self._rated = rated
        self._pool: Pool[JobT] = Pool(rated, sides)
        self._division: Division[JobT] = EveryEpoch(self._pool)
        self._found: Rates[JobT] = {}  # of those who begin, or go on, in the next decisions
        self._anew: list[Flow[JobT]] = []  # who gets another rate, whatever it has
        self._anew_awake: list[Flow[JobT]] = []  # of those, who is not idle where others are
        self._next_end_s = -math.inf
        self._has_changed = False  # since the last epoch

    def __len__(self) -> int:
        return len(self._pool.waiting)

    # --- what changes ---

    def configure(self, terms: Terms, now_s: float) -> None:
        """Other terms from now on."""
        self._pool.terms = terms
        self._division = ForLife(self._pool) if terms.are_for_life else EveryEpoch(self._pool)
        self._next_end_s = now_s
        self._has_changed = True
        self._found = {}
        self._anew, self._anew_awake = [], []

    def join(self, flow: Flow[JobT], now_s: float) -> None:
        """The flow waits for a rate."""
        if self._division.waits_for_an_end and not self._pool.waiting:
            self._next_end_s = max(self._next_end_s, now_s + self._pool.terms.epoch_s)
        self._has_changed = True
        flow.is_waiting = True
        self._pool.waiting[flow] = now_s

    def changed(self) -> None:
        """There is more or less to divide, or somebody wants another part of it."""
        self._has_changed = True

    def discard(self, flow: Flow[JobT]) -> None:
        """The flow has ended, whether it was waiting or not: there may be more to divide."""
        self._has_changed = True
        self._forget(flow)

    def _forget(self, flow: Flow[JobT]) -> None:
        flow.is_waiting = False
        self._pool.waiting.pop(flow, None)
        self._found.pop(flow, None)
        self._division.forget(flow)
        for them in (self._anew, self._anew_awake):
            if flow in them:
                them.remove(flow)

    # --- who begins, and who gets another rate ---

    def next_at_s(self, now_s: float) -> float:
        """When `admit` has something to do; infinity: before something changes."""
        division = self._division
        if self._found or self._anew or self._anew_awake or division.under_way():
            return now_s
        if not division.concerns_anybody():
            return math.inf
        if self._has_changed or division.changes_by_itself():
            return self._next_end_s
        return max(self._next_end_s, self._rated.idle_at_s)

    def admit(self, now_s: float) -> list[tuple[Flow[JobT], float]]:
        """Who has another rate from now on. An epoch's end takes several calls, so that none takes
        long: each computes rates once, or starts a few.
        """
        if self._anew or self._anew_awake:
            self._assign_some(now_s)
        elif self._found:
            return self._first_found()
        elif self._division.under_way():
            self._take(self._division.go_on(now_s))
            self._has_changed |= bool(self._found) and len(self._found) < len(self)
        elif now_s >= self.next_at_s(now_s):
            self._has_changed = False
            self._next_end_s = now_s + self._pool.terms.epoch_s
            self._take(self._division.end(now_s))
        return []

    def assign_anew(self, now_s: float) -> list[tuple[Flow[JobT], float]]:
        """The same for everybody, those who have a rate included, and without waiting for an
        epoch's end: the link is divided as if it were empty. Of many `admit` does it.
        """
        self._rated.count_idle()
        self._anew = [*self._rated.flows, *self._pool.waiting]
        if len(self._anew) > STARTED_MAX:
            return []
        while self._anew or self._anew_awake:
            self._assign_some(now_s)
        return self._first_found()

    def _assign_some(self, now_s: float) -> None:
        """Rates of everybody; then, if some are idle, of the others without them."""
        if everybody := self._anew:
            self._anew = []
            self._found = self._divided(everybody)
            awake = [flow for flow in everybody if not flow.is_idle(now_s)]
            self._anew_awake = awake if len(awake) < len(everybody) else []
        else:
            awake, self._anew_awake = self._anew_awake, []
            self._take(self._found | self._divided(awake))

    def _divided(self, flows: list[Flow[JobT]]) -> Rates[JobT]:
        return self._pool.rates({flow: flow.demand for flow in flows}, self._pool.budget)

    def _take(self, found: Rates[JobT]) -> None:
        """In an order in which the rates never add up to more than before and after: who gets less
        comes first, then who waits, then who gets more.
        """
        less, waiting, more = Rates[JobT](), Rates[JobT](), Rates[JobT]()
        for flow, rate_bytes_per_s in found.items():
            before = flow.rate_bytes_per_s
            if before is None:
                waiting[flow] = rate_bytes_per_s
            elif rate_bytes_per_s < before:
                less[flow] = rate_bytes_per_s
            else:
                more[flow] = rate_bytes_per_s
        self._found = less | waiting | more

    def _first_found(self) -> list[tuple[Flow[JobT], float]]:
        begin = list(itertools.islice(self._found.items(), STARTED_MAX))
        for flow, _ in begin:
            self._forget(flow)
        return begin

    def __repr__(self) -> str:
        return f"<Epochs {len(self)} waiting>"
