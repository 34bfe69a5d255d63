"""A running delivery's account: what was sent, what was consumed, what it may have."""

from __future__ import annotations

import math
from typing import Generic, Protocol, TypeVar

from objectcache_storage_server.plan import Fragment
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.due_times import Standing
from objectcache_storage_server.scheduling.link import Pace

FLOW_CATCH_UP_S = 0.25  # a delivery that was held up catches up with its rate this far


class Job(Protocol):
    """A delivery as the scheduler drives it. Called under the dispatcher's lock."""

    def take(self) -> Fragment | None:
        """The next fragment, if there is one and its client's side has room for it."""
        ...

    def admitted(self, rate_bytes_per_s: float | None) -> None:
        """It may begin, at this rate for its life; None where its policy assigns no rate."""
        ...


JobT = TypeVar("JobT", bound=Job)


class Flow(Generic[JobT]):
    """One job in the scheduler. `pooled` flows share the pool by policy; others take fair turns."""

    def __init__(
        self, job: JobT, demand: Demand, *, pooled: bool, rate_max: float, now_s: float
    ) -> None:
        """`rate_max` is what its client wants at most, bytes per second."""
        self.job = job
        self.demand = demand
        self.pooled = pooled
        self.begun_s = now_s
        self.origin_s = now_s  # when the GPU could have begun, by what has been sent and consumed
        self.planned_s = now_s  # when it shall begin
        self.sent_bytes = 0
        self.consumed_layers = 0
        self.is_asleep = False  # until `wake`
        self.is_waiting = False  # for an epoch with a rate for it
        self.rate_bytes_per_s: float | None = None  # assigned
        self.rate_max = rate_max
        self.pace = Pace(rate_max, FLOW_CATCH_UP_S, now_s)

    def assign(self, rate_bytes_per_s: float | None, now_s: float) -> None:
        """Give it a rate, or none, from now on."""
        rate = math.inf if rate_bytes_per_s is None else rate_bytes_per_s
        self.pace.change(min(rate, self.rate_max), now_s)
        self.rate_bytes_per_s = None if rate_bytes_per_s is None else self.pace.rate_bytes_per_s

    def sent(self, length_bytes: int, arrives_s: float) -> None:
        """A fragment was sent, whose last byte arrives then; what came late delays its GPU."""
        before = self.sent_bytes // self.demand.layer_bytes
        self.sent_bytes += length_bytes
        after = min(self.sent_bytes // self.demand.layer_bytes, self.demand.num_layers)
        if after > before:
            window_s = self.demand.compute_window_s or 0.0
            self._delay(arrives_s - (after - 1) * window_s)

    def consumed(self, layers: int, now_s: float) -> None:
        """The GPU is through with its first `layers` layers."""
        if self.consumed_layers < layers <= self.demand.num_layers:
            self.consumed_layers = layers
            self._delay(now_s - layers * (self.demand.compute_window_s or 0.0))

    def _delay(self, origin_s: float) -> None:
        self.origin_s = max(self.origin_s, origin_s)
        self.planned_s = max(self.planned_s, self.origin_s)

    @property
    def next_layer(self) -> int:
        """The layer that the next byte belongs to, from 0; the number of layers after the last."""
        return min(self.sent_bytes // self.demand.layer_bytes, self.demand.num_layers)

    @property
    def is_sent(self) -> bool:
        """Whether every byte was sent."""
        return self.sent_bytes >= self.demand.payload_bytes

    def standing(self) -> Standing:
        """For the plan; not of a flow that is sent."""
        left_bytes = self.demand.layer_bytes - self.sent_bytes % self.demand.layer_bytes
        return Standing(self.demand, self.next_layer, left_bytes, self.origin_s, self.begun_s)

    def __repr__(self) -> str:
        return f"<Flow of {self.job!r}, {self.sent_bytes} bytes sent>"
