"""A running delivery's account: what was sent, what was consumed, what it may have."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from statistics import median
from typing import Generic, Protocol, TypeVar

from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.lanes.due_times import Standing
from objectcache_storage_server.scheduling.lanes.nic_paces import Nic
from objectcache_storage_server.scheduling.lanes.pace_link import Pace

FLOW_CATCH_UP_S = 0.25  # a delivery that was held up catches up with its rate this far; then idle
REPORTS_MIN, REPORTS_KEPT = 2, 5  # of a GPU's time for a layer: the median of these counts
WINDOW_CHANGE = 0.25  # of the window: less does not change it


class ScheduledJob(Protocol):
    """A delivery as the scheduler drives it. Called under the dispatcher's lock."""

    def take(self) -> Fragment | None:
        """The next fragment, if there is one and its client's side has room for it."""
        ...

    def admitted(self, rate_bytes_per_s: float | None) -> None:
        """It may begin, at this rate until another is told; None where its policy assigns none."""
        ...


JobT = TypeVar("JobT", bound=ScheduledJob)


class Flow(Generic[JobT]):
    """One job in the scheduler. `pooled` flows share the pool by policy; others take fair turns."""

    def __init__(
        self, job: JobT, demand: Demand, *, pooled: bool, rate_max: float, now_s: float
    ) -> None:
        """`rate_max` is what its client wants at most, bytes per second."""
        self.job = job
        self.given = replace(demand, rate_max=rate_max)  # what was asked for, or measured since
        self.demand = self.given  # the same as the configuration has it
        self._left, self._left_of = self.demand, (self.demand, 0)  # as `left` found it last
        self.pooled = pooled
        self.destination = demand.tenant, demand.nic
        self.nic: Nic | None = None  # that it goes to, where it names one
        self.nic_bytes_per_s: float | None = None  # that its client says of it, until it has begun
        self.begun_s = now_s
        self.origin_s = now_s  # when the GPU could have begun, by what has been sent and consumed
        self.planned_s = now_s  # when it shall begin
        self.lead_s = 0.0  # by which its layers go before they are due, for its NIC's sake
        self.sent_bytes = 0
        self.consumed_layers = 0
        self._computes_s: deque[float] = deque(maxlen=REPORTS_KEPT)
        self.asleep_since_s: float | None = None  # until `wake`
        self.is_waiting = False  # for an epoch with a rate for it
        self.rate_bytes_per_s: float | None = None  # assigned
        self.pace = Pace(rate_max, FLOW_CATCH_UP_S, now_s)

    def assign(self, rate_bytes_per_s: float | None, now_s: float) -> None:
        """Give it a rate, or none, from now on. Who had one may still catch up with it."""
        rate = math.inf if rate_bytes_per_s is None else rate_bytes_per_s
        has_both = None not in (self.rate_bytes_per_s, rate_bytes_per_s)
        change = self.pace.turn if has_both else self.pace.change
        change(min(rate, self.given.rate_max), now_s)
        self.rate_bytes_per_s = None if rate_bytes_per_s is None else self.pace.rate_bytes_per_s

    def sent(self, length_bytes: int, arrives_s: float) -> None:
        """A fragment was sent, whose last byte arrives then; what came late delays its GPU."""
        before = self.sent_bytes // self.demand.layer_bytes
        self.sent_bytes += length_bytes
        after = min(self.sent_bytes // self.demand.layer_bytes, self.demand.num_layers)
        if after > before:
            window_s = self.demand.compute_window_s or 0.0
            self._delay(arrives_s - (after - 1) * window_s)

    def consumed(self, layers: int, now_s: float, compute_s: float | None = None) -> None:
        """The GPU is through with its first `layers` layers; it computed each for `compute_s`."""
        if self.consumed_layers < layers <= self.demand.num_layers:
            self.consumed_layers = layers
            self._delay(now_s - layers * (self.demand.compute_window_s or 0.0))
            if compute_s is not None and 0.0 < compute_s < math.inf:
                self._computes_s.append(compute_s)

    def measured(self) -> Demand | None:
        """The demand with the window that its GPU needs; None until that was reported twice."""
        if len(self._computes_s) < REPORTS_MIN:
            return None
        return replace(self.given, compute_window_s=median(self._computes_s))

    def differs_from(self, seen: Demand) -> bool:
        """Whether its due times would be clearly others with that window."""
        before_s, after_s = self.demand.compute_window_s or 0.0, seen.compute_window_s or 0.0
        return abs(after_s - before_s) > WINDOW_CHANGE * before_s

    def take_over(self, given: Demand, seen: Demand, now_s: float) -> None:
        """Another window: the origin is what the consumption says, and no later than was known."""
        self.given, self.demand = given, seen
        consumed_s = self.consumed_layers * (seen.compute_window_s or 0.0)
        self.origin_s = max(self.begun_s, min(self.origin_s, now_s - consumed_s))
        self.planned_s = self.origin_s

    def _delay(self, origin_s: float) -> None:
        self.origin_s = max(self.origin_s, origin_s)
        self.planned_s = max(self.planned_s, self.origin_s)

    @property
    def is_asleep(self) -> bool:
        """Whether its client's side had no room for what comes next."""
        return self.asleep_since_s is not None

    @property
    def idle_at_s(self) -> float:
        """When it will have slept for longer than it may catch up with; infinity if awake. Who has
        sent everything is idle.
        """
        if self.is_sent:
            return -math.inf
        return math.inf if self.asleep_since_s is None else self.asleep_since_s + FLOW_CATCH_UP_S

    def is_idle(self, now_s: float) -> bool:
        """Whether it does not use its rate, and will not miss what it did not use."""
        return now_s >= self.idle_at_s

    @property
    def next_layer(self) -> int:
        """The layer that the next byte belongs to, from 0; the number of layers after the last."""
        return min(self.sent_bytes // self.demand.layer_bytes, self.demand.num_layers)

    @property
    def is_sent(self) -> bool:
        """Whether every byte was sent."""
        return self.sent_bytes >= self.demand.payload_bytes

    @property
    def left(self) -> Demand:
        """What it still has to send, in whole layers; one, where that is nothing."""
        if (self.demand, self.next_layer) != self._left_of:
            self._left_of = self.demand, self.next_layer
            layers = max(1, self.demand.num_layers - self.next_layer)
            self._left = replace(self.demand, num_layers=layers)
        return self._left

    def standing(self) -> Standing:
        """For the plan; not of a flow that is sent."""
        left_bytes = self.demand.layer_bytes - self.sent_bytes % self.demand.layer_bytes
        nic = self.nic
        nic_bytes_per_s = math.inf if nic is None else nic.pool_bytes_per_s
        return Standing(
            self.demand,
            self.next_layer,
            left_bytes,
            self.origin_s,
            self.begun_s,
            nic_bytes_per_s,
        )

    def __repr__(self) -> str:
        return f"<Flow of {self.job!r}, {self.sent_bytes} bytes sent>"
