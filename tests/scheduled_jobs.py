"""Jobs for a scheduler, and virtual time that passes as it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.scheduler import Scheduler, Wait
from objectcache_storage_server.scheduling.ttft_model import ttft_of_arrivals

WAITS_IN_PLACE_MAX = 1000  # a decision of many steps is made in several


@dataclass(eq=False)
class Job:
    """Sends its layers in pieces; its client's side has room for `room` of them."""

    demand: Demand
    fragment_bytes: int
    room: float = math.inf
    rates: list[float | None] = field(default_factory=list[float | None])
    sent: list[tuple[float, Fragment]] = field(default_factory=list[tuple[float, Fragment]])
    taken_bytes: int = 0

    def take(self) -> Fragment | None:
        if self.is_taken or self.room < 1:
            return None
        self.room -= 1
        layer, in_layer = divmod(self.taken_bytes, self.demand.layer_bytes)
        length = min(self.fragment_bytes, self.demand.layer_bytes - in_layer)
        fragment = Fragment(self.taken_bytes, length, 0, 1, layer, layer + 1)
        self.taken_bytes += length
        return fragment

    def admitted(self, rate_bytes_per_s: float | None) -> None:
        self.rates.append(rate_bytes_per_s)

    @property
    def is_taken(self) -> bool:
        return self.taken_bytes >= self.demand.payload_bytes

    @property
    def first_s(self) -> float:
        return self.sent[0][0]

    @property
    def last_s(self) -> float:
        return self.sent[-1][0]

    @property
    def achieved_bytes_per_s(self) -> float:
        """From its first fragment until its last one's pace is through."""
        before_last = sum(fragment.length_bytes for _, fragment in self.sent[:-1])
        return before_last / (self.last_s - self.first_s)

    def ttft_s(self, begun_s: float, cap_bytes_per_s: float) -> float:
        """With a GPU that computes as its window says, on a link of that rate."""
        ends = {
            fragment.first_layer: at_s - begun_s + fragment.length_bytes / cap_bytes_per_s
            for at_s, fragment in self.sent
        }
        arrivals_s = [ends[layer] for layer in range(self.demand.num_layers)]
        return ttft_of_arrivals(arrivals_s, self.demand.compute_window_s or 0.0)


def run(
    scheduler: Scheduler[Job],
    now_s: float = 0.0,
    until_s: float = math.inf,
    events: Sequence[tuple[float, Callable[[float], None]]] = (),
) -> float:
    """Grant what may go until nothing is left to, or until a time; what is sent to its end is
    removed. `events` are called at their times. Returns the time.
    """
    pending = sorted(events, key=lambda event: event[0])
    waits_in_place = 0
    while True:
        while pending and pending[0][0] <= now_s:
            pending.pop(0)[1](now_s)
        step = scheduler.next(now_s)
        if isinstance(step, Wait):
            wake_s = min(step.until_s, pending[0][0] if pending else math.inf)
            if wake_s > until_s or wake_s == math.inf:
                return until_s if until_s < math.inf else now_s
            waits_in_place = 0 if wake_s > now_s else waits_in_place + 1
            assert waits_in_place < WAITS_IN_PLACE_MAX, f"{scheduler!r} makes no progress"
            now_s = max(now_s, wake_s)
            continue
        waits_in_place = 0
        step.job.sent.append((now_s, step.fragment))
        if step.job.is_taken:
            scheduler.remove(step.job, now_s)


def bytes_by_time(jobs: Sequence[Job]) -> list[tuple[float, int]]:
    """All fragments, in order of time."""
    return sorted((at_s, fragment.length_bytes) for job in jobs for at_s, fragment in job.sent)


def busiest_window_bytes(jobs: Sequence[Job], window_s: float) -> int:
    """The most that went in any window of that length."""
    sent, first, total, most = bytes_by_time(jobs), 0, 0, 0
    for at_s, length_bytes in sent:
        total += length_bytes
        while sent[first][0] <= at_s - window_s:
            total -= sent[first][1]
            first += 1
        most = max(most, total)
    return most
