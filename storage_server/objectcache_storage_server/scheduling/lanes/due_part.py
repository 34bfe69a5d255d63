"""Deliveries that are planned together, and the lines in which they wait for their NICs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.due_times import (
    PLANNED_MAX,
    OriginSearch,
    due_s,
    urgency,
)
from objectcache_storage_server.scheduling.lanes.fair_lane import MOVED_MAX
from objectcache_storage_server.scheduling.lanes.keyed_line import KeyedLine
from objectcache_storage_server.scheduling.lanes.nic_paces import Nic

LATE_S = 0.005  # behind its plan by this much, a delivery is a reason to plan again
PLAN_AGAIN_S = 0.05  # at the earliest
CAPACITY_CHANGE = 0.1  # of what was planned with: another reason
LINES_MAX = 8  # ranked by the rule in one decision; more take turns


class DueLine(Generic[JobT]):
    """Flows that may be chosen, of those that go to one NIC, or that name none."""

    part: DuePart[JobT]  # with whom they are planned

    def __init__(self, nic: Nic | None, number: int, changed: dict[DueLine[JobT], None]) -> None:
        """`number` is less than a later line's; `changed` has the lines that are marked."""
        self.nic = nic
        self.number = number
        self.is_changed = False
        self._changed = changed
        self.flow_count = 0  # of the lane, whether they may be chosen or not
        self.by_due: KeyedLine[Flow[JobT]] = KeyedLine()  # or by the latest time to begin
        self.late: KeyedLine[Flow[JobT]] = KeyedLine()  # by urgency

    def mark_changed(self) -> None:
        """Who stands in front may be another one."""
        self.is_changed = True
        self._changed[self] = None

    @property
    def opens_at_s(self) -> float:
        """When its NIC may be sent something; in the past that is now."""
        return -math.inf if self.nic is None else self.nic.next_at_s(pooled=True)

    @property
    def bytes_per_s(self) -> float:
        """What its NIC carries for them; infinity where that is not known."""
        return math.inf if self.nic is None else self.nic.pool_bytes_per_s

    def __contains__(self, flow: Flow[JobT]) -> bool:
        return flow in self.by_due or flow in self.late

    def discard(self, flow: Flow[JobT]) -> None:
        """It may not be chosen."""
        self.mark_changed()
        self.by_due.discard(flow)
        self.late.discard(flow)

    def first(self) -> tuple[tuple[bool, float], Flow[JobT]] | None:
        """Whose turn it is, after its place among those of other lines: the late come first."""
        if (late := self.late.first()) is not None:
            return (False, late[0]), late[1]
        first = self.by_due.first()
        return None if first is None else ((True, first[0]), first[1])

    def __repr__(self) -> str:
        return f"<DueLine of {len(self.by_due)} and {len(self.late)} late, {self.nic!r}>"


class DuePart(Generic[JobT]):
    """What shares a link, or a NIC, and so a plan: of no more than `PLANNED_MAX` flows; more are
    chosen by the rule of `UrgentLane`.
    """

    def __init__(self, capacity_bytes_per_s: Callable[[float], float]) -> None:
        """`capacity_bytes_per_s` tells, at a time, what all of its flows get together."""
        self.flows: dict[Flow[JobT], None] = {}
        self.lines: list[DueLine[JobT]] = []
        self.must_plan = False
        self._capacity = capacity_bytes_per_s
        self.is_planned = True  # else by the rule
        self._planned_at_s = -math.inf
        self._planned_capacity = math.inf
        self._search: OriginSearch | None = None  # for an order better than the plan's
        self._searched: list[Flow[JobT]] = []

    def add(self, flow: Flow[JobT]) -> bool:
        """Returns whether there are too many for a plan since."""
        self.must_plan = True
        self.flows[flow] = None
        return self.is_planned and len(self.flows) > PLANNED_MAX

    def discard(self, flow: Flow[JobT]) -> None:
        """It has ended, or is planned with others."""
        self.must_plan = True
        del self.flows[flow]

    def go_by_rule(self, now_s: float) -> None:
        """They are too many."""
        self.is_planned = False
        self._search = None
        self._rank_all(now_s)

    def ready(self, line: DueLine[JobT], flow: Flow[JobT], now_s: float) -> None:
        """The flow may be chosen; its key is found anew."""
        if not line.is_changed:
            line.mark_changed()
        line.late.discard(flow)
        line.by_due.put(flow, self._key(flow, now_s))

    def _key(self, flow: Flow[JobT], now_s: float) -> float:
        if flow.is_sent:
            return math.inf
        standing = flow.standing()
        if self.is_planned:
            return due_s(standing, flow.planned_s) - flow.lead_s
        rate = min(self._capacity(now_s), standing.nic_bytes_per_s)
        return due_s(standing, flow.origin_s) - standing.left_bytes / rate

    def _rank_all(self, now_s: float) -> None:
        for line in self.lines:
            for flow in [*line.by_due, *line.late]:
                self.ready(line, flow, now_s)

    # --- in a decision ---

    def prepare(self, now_s: float) -> bool:
        """What is done once in a decision; returns whether that took as long as a plan."""
        if len(self.flows) > PLANNED_MAX:
            lines = self.lines
            if len(lines) > LINES_MAX:
                lines = lines[:LINES_MAX]
                self.lines = self.lines[LINES_MAX:] + lines  # the others first the next time
            for line in lines:
                if line.nic is None or line.opens_at_s <= now_s:
                    self._rank_by_rule(line, now_s)
        elif self.must_plan or self._is_off_plan(now_s):
            self._plan(now_s)
            return True
        elif self._search is not None:
            self._search_on(now_s)
            return True
        return False

    def _rank_by_rule(self, line: DueLine[JobT], now_s: float) -> None:
        if not line.is_changed:
            line.mark_changed()
        for _ in range(MOVED_MAX):
            if (first := line.by_due.first()) is None or first[0] > now_s:
                break
            line.by_due.discard(first[1])
            self._rank_late(line, first[1], now_s)
        if (stalest := line.late.stalest()) is not None:
            self._rank_late(line, stalest, now_s)

    def _rank_late(self, line: DueLine[JobT], flow: Flow[JobT], now_s: float) -> None:
        """Urgency grows with time, of each flow at its own pace."""
        key = math.inf
        if not flow.is_sent:
            key = urgency(flow.standing(), self._capacity(now_s), now_s)
        line.late.put(flow, key)

    def _is_off_plan(self, now_s: float) -> bool:
        """Whether somebody comes later than planned, or the link is another one."""
        if now_s - self._planned_at_s <= PLAN_AGAIN_S:
            return False
        firsts = [first[0] for line in self.lines if (first := line.by_due.first()) is not None]
        if not firsts:
            return False
        change = abs(self._capacity(now_s) - self._planned_capacity)
        return min(firsts) < now_s - LATE_S or change > CAPACITY_CHANGE * self._planned_capacity

    def _plan(self, now_s: float) -> None:
        self.must_plan = False
        self.is_planned = True
        self._planned_at_s = now_s
        self._planned_capacity = self._capacity(now_s)
        self._take_over([flow for flow in self.flows if not flow.is_sent], None, now_s)

    def _take_over(
        self, flows: list[Flow[JobT]], order: Sequence[int] | None, now_s: float
    ) -> None:
        standings = [flow.standing() for flow in flows]
        self._search = OriginSearch(standings, self._planned_capacity, now_s, order)
        self._searched = flows
        origins_s, leads_s = self._search.origins_s(), self._search.leads_s()
        for flow, origin_s, lead_s in zip(flows, origins_s, leads_s, strict=True):
            flow.planned_s, flow.lead_s = origin_s, lead_s
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

    def __repr__(self) -> str:
        return f"<DuePart {len(self.flows)} flows in {len(self.lines)} lines>"
