"""The lane of stall_dynamic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.due_times import (
    PLANNED_MAX,
    OriginSearch,
    due_s,
    urgency,
)
from objectcache_storage_server.scheduling.lanes.fair_lane import MOVED_MAX, FlowLane
from objectcache_storage_server.scheduling.lanes.keyed_line import KeyedLine

LATE_S = 0.005  # behind its plan by this much, a delivery is a reason to plan again
PLAN_AGAIN_S = 0.05  # at the earliest
CAPACITY_CHANGE = 0.1  # of what was planned with: another reason


class UrgentLane(FlowLane[JobT]):
    """stall_dynamic: earliest due time first, by the plan of `due_times`.

    More flows than a plan is made for are chosen by a rule: of those that would come late if they
    waited, the most urgent; else the one that can wait least.
    """

    def __init__(self, capacity_bytes_per_s: Callable[[float], float]) -> None:
        """`capacity_bytes_per_s` tells, at a time, what all flows of the lane get together."""
        super().__init__()
        self._capacity = capacity_bytes_per_s
        self._line: KeyedLine[Flow[JobT]] = (
            KeyedLine()
        )  # by due time, or by the latest time to begin
        self._late: KeyedLine[Flow[JobT]] = KeyedLine()  # by urgency
        self._is_planned = True  # else by the rule
        self._must_plan = False
        self._planned_at_s = -math.inf
        self._planned_capacity = math.inf
        self._search: OriginSearch | None = None  # for an order better than the plan's
        self._searched: list[Flow[JobT]] = []
        self._unranked: list[Flow[JobT]] = []  # whose key is of before a change

    def add(self, flow: Flow[JobT], now_s: float) -> None:
        self._must_plan = True
        super().add(flow, now_s)
        if self._is_planned and len(self.flows) > PLANNED_MAX:
            self._is_planned = False
            self._search = None
            self._rank_all(now_s)

    def discard(self, flow: Flow[JobT]) -> None:
        self._must_plan = self._must_plan or flow in self.flows
        super().discard(flow)

    def _ready(self, flow: Flow[JobT], now_s: float) -> None:
        self._late.discard(flow)
        self._line.put(flow, self._key(flow, now_s))

    def _key(self, flow: Flow[JobT], now_s: float) -> float:
        if flow.is_sent:
            return math.inf
        standing = flow.standing()
        if self._is_planned:
            return due_s(standing, flow.planned_s)
        return due_s(standing, flow.origin_s) - standing.left_bytes / self._capacity(now_s)

    def _rank(self, flow: Flow[JobT]) -> float:
        origin_s = flow.planned_s if self._is_planned else flow.origin_s
        return math.inf if flow.is_sent else due_s(flow.standing(), origin_s)

    def _rank_all(self, now_s: float) -> None:
        for flow in [*self._line, *self._late]:
            self._ready(flow, now_s)

    def _unready(self, flow: Flow[JobT]) -> None:
        self._line.discard(flow)
        self._late.discard(flow)

    def reckon_anew(self, flow: Flow[JobT], now_s: float) -> None:
        """The flow's window is another one."""
        self._must_plan = self._must_plan or flow in self.flows
        if flow in self._line or flow in self._late:
            self._ready(flow, now_s)

    def reckon_all_anew(self) -> None:
        """The link or the weights are others: all flows are ranked again, a few a decision."""
        self._must_plan = True
        self._unranked = [*self._line, *self._late]

    def _prepare(self, now_s: float) -> None:
        super()._prepare(now_s)
        for _ in range(min(MOVED_MAX, len(self._unranked))):
            flow = self._unranked.pop()
            if flow in self._line or flow in self._late:
                self._ready(flow, now_s)
        if len(self.flows) > PLANNED_MAX:
            self._rank_by_rule(now_s)
        elif self._must_plan or self._is_off_plan(now_s):
            self._plan(now_s)
        elif self._search is not None:
            self._search_on(now_s)

    def _first(self, now_s: float) -> Flow[JobT] | None:
        chosen = self._late.first() or self._line.first()
        return chosen[1] if chosen else None

    def sent(self, flow: Flow[JobT], length_bytes: int, now_s: float) -> None:
        self._ready(flow, now_s)

    # --- by the rule ---

    def _rank_by_rule(self, now_s: float) -> None:
        for _ in range(MOVED_MAX):
            if (first := self._line.first()) is None or first[0] > now_s:
                break
            self._line.discard(first[1])
            self._rank_late(first[1], now_s)
        if (stalest := self._late.stalest()) is not None:
            self._rank_late(stalest, now_s)

    def _rank_late(self, flow: Flow[JobT], now_s: float) -> None:
        """Urgency grows with time, of each flow at its own pace."""
        key = math.inf
        if not flow.is_sent:
            key = urgency(flow.standing(), self._capacity(now_s), now_s)
        self._late.put(flow, key)

    # --- by the plan ---

    def _is_off_plan(self, now_s: float) -> bool:
        """Whether somebody comes later than planned, or the link is another one."""
        if now_s - self._planned_at_s <= PLAN_AGAIN_S or (first := self._line.first()) is None:
            return False
        change = abs(self._capacity(now_s) - self._planned_capacity)
        return first[0] < now_s - LATE_S or change > CAPACITY_CHANGE * self._planned_capacity

    def _plan(self, now_s: float) -> None:
        self._must_plan = False
        self._is_planned = True
        self._planned_at_s = now_s
        self._planned_capacity = self._capacity(now_s)
        self._take_over([flow for flow in self.flows if not flow.is_sent], None, now_s)

    def _take_over(
        self, flows: list[Flow[JobT]], order: Sequence[int] | None, now_s: float
    ) -> None:
        standings = [flow.standing() for flow in flows]
        self._search = OriginSearch(standings, self._planned_capacity, now_s, order)
        self._searched = flows
        for flow, origin_s in zip(flows, self._search.origins_s(), strict=True):
            flow.planned_s = origin_s
        self._rank_all(now_s)

    def _search_on(self, now_s: float) -> None:
        assert self._search is not None
        if self._search.try_one():
            flows = [self._searched[index] for index in self._search.order]
            flows = [flow for flow in flows if not flow.is_sent]
            left = self._search.left
            self._take_over(flows, range(len(flows)), now_s)  # as they stand now
            self._search.left = left
        elif self._search.is_over:
            self._search, self._searched = None, []
