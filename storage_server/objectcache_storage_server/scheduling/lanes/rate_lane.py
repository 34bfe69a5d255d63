"""The lane of those that have rates."""

from __future__ import annotations

import math

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.fair_lane import FlowLane
from objectcache_storage_server.scheduling.lanes.keyed_line import KeyedLine
from objectcache_storage_server.scheduling.lanes.split_link import Sides


class RateLane(FlowLane[JobT]):
    """Flows with rates: deficits that time fills, a flow at a time.

    A flow's deficit is its rate times the time since its pace allowed it to go. The one that has
    waited longest for its share goes first.

    A flow that has slept too long, or has sent everything, is idle, once `leave_out_idle` was
    called: it keeps its rate, but neither `rate_bytes_per_s` nor `sides` counts it until it wakes.
    So those that are awake may have more than the link together; the link's pace says what goes.
    """

    def __init__(self, sides: Sides) -> None:
        """`sides` counts the flows of the lane; here those that are idle are left out of it."""
        super().__init__()
        self._sides = sides
        self.rate_bytes_per_s = 0.0  # of all that are counted
        self._line: KeyedLine[Flow[JobT]] = KeyedLine()
        self._sleeping: KeyedLine[Flow[JobT]] = KeyedLine()  # by when they are idle
        self._idle: set[Flow[JobT]] = set()

    def add(self, flow: Flow[JobT], now_s: float) -> None:
        self.rate_bytes_per_s += flow.rate_bytes_per_s or 0.0
        super().add(flow, now_s)
        if flow.is_asleep:
            self._sleeping.put(flow, flow.idle_at_s)

    def discard(self, flow: Flow[JobT]) -> None:
        self._count_again(flow)
        if flow in self.flows:
            self.rate_bytes_per_s -= flow.rate_bytes_per_s or 0.0
        super().discard(flow)
        if not self.flows:
            self.rate_bytes_per_s = 0.0

    def assign(self, flow: Flow[JobT], rate_bytes_per_s: float, now_s: float) -> None:
        """Another rate for a flow of the lane."""
        before = flow.rate_bytes_per_s or 0.0
        flow.assign(rate_bytes_per_s, now_s)
        if flow not in self._idle:
            self.rate_bytes_per_s += (flow.rate_bytes_per_s or 0.0) - before
        if flow in self._parked or flow in self._line:
            self._parked.discard(flow)
            self._ready(flow, now_s)

    def sleep(self, flow: Flow[JobT], now_s: float) -> None:
        super().sleep(flow, now_s)
        if flow not in self._idle:
            self._sleeping.put(flow, flow.idle_at_s)

    def wake(self, flow: Flow[JobT], now_s: float) -> None:
        if not flow.is_sent:
            self._count_again(flow)
        super().wake(flow, now_s)

    @property
    def idle_at_s(self) -> float:
        """When `leave_out_idle` finds another one; infinity where none sleeps."""
        first = self._sleeping.first()
        return first[0] if first else math.inf

    def leave_out_idle(self, now_s: float) -> None:
        """Count those no longer that have slept too long."""
        while (first := self._sleeping.first()) is not None and first[0] <= now_s:
            flow = first[1]
            self._sleeping.discard(flow)
            self._idle.add(flow)
            self.rate_bytes_per_s -= flow.rate_bytes_per_s or 0.0
            self._sides.discard(flow.demand.tenant, pooled=True)
        if len(self._idle) == len(self.flows):
            self.rate_bytes_per_s = 0.0  # exactly, whatever was rounded

    def count_idle(self) -> None:
        """Count them again, until `leave_out_idle`."""
        for flow in list(self._idle):
            self._count_again(flow)
            self._sleeping.put(flow, flow.idle_at_s)

    def not_idle(self) -> list[Flow[JobT]]:
        """Those that are counted."""
        return [flow for flow in self.flows if flow not in self._idle]

    def _count_again(self, flow: Flow[JobT]) -> None:
        self._sleeping.discard(flow)
        if flow in self._idle:
            self._idle.discard(flow)
            self.rate_bytes_per_s += flow.rate_bytes_per_s or 0.0
            self._sides.add(flow.demand.tenant, pooled=True)

    def _ready(self, flow: Flow[JobT], now_s: float) -> None:
        self._line.put(flow, flow.pace.next_at_s)

    def _unready(self, flow: Flow[JobT]) -> None:
        self._line.discard(flow)

    def _first(self, now_s: float) -> Flow[JobT] | None:
        first = self._line.first()
        return first[1] if first else None

    def _rank(self, flow: Flow[JobT]) -> float:
        return flow.pace.next_at_s

    def sent(self, flow: Flow[JobT], length_bytes: int, now_s: float) -> None:
        self._line.put(flow, flow.pace.next_at_s)
        if flow.is_sent and flow not in self._idle:
            self._sleeping.put(flow, flow.idle_at_s)
