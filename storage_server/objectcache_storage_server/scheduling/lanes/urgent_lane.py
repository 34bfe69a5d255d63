"""The lane of stall_dynamic."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.due_part import DueLine, DuePart
from objectcache_storage_server.scheduling.lanes.due_times import due_s
from objectcache_storage_server.scheduling.lanes.fair_lane import MOVED_MAX, FlowLane
from objectcache_storage_server.scheduling.lanes.nic_paces import Nic
from objectcache_storage_server.scheduling.lanes.open_lines import OpenLines

PARTS_MAX = 8  # looked at in one decision; more take turns
_ROUNDING = 1e-9  # of the cap


class UrgentLane(FlowLane[JobT]):
    """stall_dynamic: earliest due time first, by the plan of `due_times`.

    More flows than a plan is made for are chosen by a rule: of those that would come late if they
    waited, the most urgent; else the one that can wait least.

    Flows to one NIC stand in a line of their own, which is passed over while the NIC is full. Where
    all NICs together carry no more than the cap, each is planned by itself; else all are planned
    together, because what one is sent another cannot be.
    """

    def __init__(
        self,
        capacity_bytes_per_s: Callable[[float], float],
        bound_bytes_per_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`capacity_bytes_per_s` tells, at a time, what all flows of the lane get together;
        `bound_bytes_per_s` how much of the cap that is, infinity without one.
        """
        super().__init__()
        self._capacity = capacity_bytes_per_s
        self._bound = bound_bytes_per_s
        self._lines: dict[Nic | None, DueLine[JobT]] = {}
        self._parts: dict[Nic | None, DuePart[JobT]] = {}
        self._must_regroup = False
        self._grouped_by = math.inf  # the bound
        self._open: OpenLines[JobT] = OpenLines()
        self._unranked: list[Flow[JobT]] = []  # whose key is of before a change

    # --- who is planned with whom ---

    def add(self, flow: Flow[JobT], now_s: float) -> None:
        line = self._lines.get(flow.nic)
        if line is None:
            line = self._lines[flow.nic] = self._open.new_line(flow.nic)
            self._group(line, None)
            self._must_regroup = True
        line.flow_count += 1
        are_too_many = line.part.add(flow)
        super().add(flow, now_s)
        if are_too_many:
            line.part.go_by_rule(now_s)

    def discard(self, flow: Flow[JobT]) -> None:
        if flow not in self.flows:
            return
        super().discard(flow)
        line = self._lines[flow.nic]
        line.part.discard(flow)
        line.flow_count -= 1
        if not line.flow_count:
            self._ungroup(line)
            del self._lines[flow.nic]
            self._open.forget(line)
            self._must_regroup = True
        if not self._lines:
            self._unranked.clear()  # an empty lane makes no decision

    def _group(self, line: DueLine[JobT], key: Nic | None) -> None:
        """Plan the line with all others of this key."""
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = DuePart(self._capacity if key is None else self._slower(key))
        part.lines.append(line)
        line.part = part

    def _slower(self, nic: Nic) -> Callable[[float], float]:
        return lambda now_s: min(self._capacity(now_s), nic.pool_bytes_per_s)

    def _ungroup(self, line: DueLine[JobT]) -> None:
        line.part.lines.remove(line)
        if not line.part.lines:
            self._parts = {key: one for key, one in self._parts.items() if one is not line.part}

    def _regroup(self, now_s: float) -> None:
        """Where NICs have come or gone, or carry more or less, or the lane has more or less."""
        bound = self._bound()
        if not self._must_regroup and bound == self._grouped_by:
            return
        self._must_regroup, self._grouped_by = False, bound
        together = sum(line.bytes_per_s for line in self._lines.values())
        are_apart = bound == math.inf or together <= bound * (1 + _ROUNDING)
        for nic, line in self._lines.items():
            key = nic if are_apart and line.bytes_per_s < math.inf else None
            if self._parts.get(key) is line.part:
                continue
            moved = [flow for flow in line.part.flows if flow.nic is nic]
            for flow in moved:
                line.part.discard(flow)
            self._ungroup(line)
            self._group(line, key)
            are_too_many = [line.part.add(flow) for flow in moved]
            if any(are_too_many):
                line.part.go_by_rule(now_s)
            self._unranked += [flow for flow in moved if flow in line]

    # --- who may be chosen ---

    def _ready(self, flow: Flow[JobT], now_s: float) -> None:
        line = self._lines[flow.nic]
        line.part.ready(line, flow, now_s)

    def _unready(self, flow: Flow[JobT]) -> None:
        self._lines[flow.nic].discard(flow)

    def _rank(self, flow: Flow[JobT]) -> float:
        origin_s = flow.planned_s if self._lines[flow.nic].part.is_planned else flow.origin_s
        return math.inf if flow.is_sent else due_s(flow.standing(), origin_s)

    def _is_ready(self, flow: Flow[JobT]) -> bool:
        return flow in self.flows and flow in self._lines[flow.nic]

    def reckon_anew(self, flow: Flow[JobT], now_s: float) -> None:
        """The flow's window is another one."""
        if flow in self.flows:
            self._lines[flow.nic].part.must_plan = True
            if self._is_ready(flow):
                self._ready(flow, now_s)

    def nic_changed(self, nic: Nic) -> None:
        """It carries more or less."""
        if (line := self._lines.get(nic)) is not None:
            line.part.must_plan = True
            self._must_regroup = True
            self._open.opens_otherwise(line)

    def reckon_all_anew(self) -> None:
        """The link or the weights are others: all flows are ranked again, a few a decision."""
        for part in self._parts.values():
            part.must_plan = True
        self._unranked = [
            flow for line in self._lines.values() for flow in (*line.by_due, *line.late)
        ]

    # --- in a decision ---

    def _prepare(self, now_s: float) -> None:
        super()._prepare(now_s)
        if len(self._lines) > 1 or len(self._parts) > 1:
            self._regroup(now_s)
        for _ in range(min(MOVED_MAX, len(self._unranked))):
            flow = self._unranked.pop()
            if self._is_ready(flow):
                self._ready(flow, now_s)
        parts = self._parts
        are_many = len(parts) > PARTS_MAX
        for key, part in list(islice(parts.items(), PARTS_MAX)) if are_many else parts.items():
            took_long = part.prepare(now_s)
            if took_long or are_many:
                parts[key] = parts.pop(key)  # the others first in the next decision
            if took_long:
                break

    def _first(self, now_s: float) -> Flow[JobT] | None:
        if len(self._lines) > 1:
            return self._open.first(now_s)
        for line in self._lines.values():
            if line.nic is None or line.opens_at_s <= now_s:
                first = line.first()
                return None if first is None else first[1]
        return None

    @property
    def wake_at_s(self) -> float:
        """The same, and when a NIC that is full may be sent something."""
        if len(self._lines) > 1:
            return min(super().wake_at_s, self._open.next_at_s())
        wake_at_s = super().wake_at_s
        for line in self._lines.values():
            if line.nic is not None and line.first() is not None:
                wake_at_s = min(wake_at_s, line.opens_at_s)
        return wake_at_s

    def standing_before(self, nic: Nic, now_s: float) -> int:
        """Flows that could go but for this NIC."""
        line = self._lines.get(nic)
        if line is None or line.opens_at_s <= now_s:
            return 0
        return len(line.by_due) + len(line.late)

    def sent(self, flow: Flow[JobT], length_bytes: int, now_s: float) -> None:
        self._ready(flow, now_s)
