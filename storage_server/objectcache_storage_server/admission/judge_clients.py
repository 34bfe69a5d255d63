"""Which clients are so slow with a body or a put that they count as stalled. Pure.

Slowness harms nobody as long as nobody waits for what a client holds. Where somebody does who holds
less, a client below a least rate for a window is told to end. Only time that was spent waiting
for it counts: what a schedule or a device held up is not its fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from objectcache_runtime.metrics.recent_count import RecentCount

WINDOW_S = 2.0  # of a client that is watched
WAITING_PART_MIN = 0.5  # of the window, below which nothing can be said of the client


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a pace had come to when it was last looked at."""

    at_s: float
    arrived_bytes: int
    waited_s: float


class ClientRate:
    """How fast one client takes a body, or sends a put, while it is waited for."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.moved_bytes = 0
        self.unsent_bytes: Callable[[], int] = _nothing
        self.is_cut = False
        self._waited_s = 0.0
        self._waits_since_s: float | None = None
        self.mark: _Mark | None = None

    def moved(self, length_bytes: int) -> None:
        """The client has taken, or sent, so much more; of a body, the kernel has taken it."""
        self.moved_bytes += length_bytes

    @property
    def arrived_bytes(self) -> int:
        """What has moved, less what waits in the kernel: a socket takes megabytes at once and then
        nothing for as long as the client needs for most of them.
        """
        return self.moved_bytes - self.unsent_bytes()

    def waited_s(self, now_s: float) -> float:
        """How long it was waited for."""
        since_s = now_s if self._waits_since_s is None else self._waits_since_s
        return self._waited_s + now_s - since_s

    def waiting_begins(self, now_s: float) -> None:
        """The client is waited for from now on."""
        self._waits_since_s = now_s

    def waiting_ends(self, now_s: float) -> None:
        """The client is waited for no more."""
        self._waited_s, self._waits_since_s = self.waited_s(now_s), None

    def look(self, now_s: float) -> float | None:
        """The rate since the last mark, in bytes a second of waiting; None where it is too early to
        say, or the client was not what was waited for.
        """
        mark = self.mark
        if mark is None:
            self._set_mark(now_s)
            return None
        window_s = now_s - mark.at_s
        if window_s < WINDOW_S:
            return None
        waited_s = self.waited_s(now_s) - mark.waited_s
        arrived_bytes = self.arrived_bytes - mark.arrived_bytes
        self._set_mark(now_s)
        return arrived_bytes / waited_s if waited_s >= WAITING_PART_MIN * window_s else None

    def _set_mark(self, now_s: float) -> None:
        self.mark = _Mark(now_s, self.arrived_bytes, self.waited_s(now_s))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tenant}: {self.moved_bytes} bytes>"


RateT = TypeVar("RateT", bound=ClientRate)


class SlowestFirst(Generic[RateT]):
    """Judges the clients of one kind that go on: who holds others up and is below the rate."""

    def __init__(self, rate_bytes_per_s_min: int, holds_up: Callable[[str], bool]) -> None:
        """`holds_up` says of a tenant whether one waits who holds less, or itself."""
        self.cut_count = 0
        self.cut_lately = RecentCount()
        self._rate_bytes_per_s_min = rate_bytes_per_s_min
        self._holds_up = holds_up
        self._going_on: dict[RateT, None] = {}
        self._slow: dict[RateT, float] = {}  # below the rate, and not cut yet

    @property
    def watched(self) -> int:
        """How many go on."""
        return len(self._going_on)

    def watch(self, client: RateT) -> None:
        """Judge another client, too, until `remove`."""
        self._going_on[client] = None

    def remove(self, client: RateT) -> None:
        """It has ended. A second call has no effect."""
        self._going_on.pop(client, None)
        self._slow.pop(client, None)

    def slowest(self, now_s: float, most: int) -> list[RateT]:
        """The clients to be cut now, at most so many."""
        tenants = {client.tenant for client in self._going_on}
        holding_up = {tenant: self._holds_up(tenant) for tenant in tenants}
        for client in self._going_on:
            self._judge(client, now_s, is_holding_up=holding_up[client.tenant])
        found = sorted(self._slow, key=self._slow.__getitem__)[:most]
        for client in found:
            del self._slow[client]
        self.cut_count += len(found)
        if found:
            self.cut_lately.add(now_s, len(found))
        return found

    def _judge(self, client: RateT, now_s: float, *, is_holding_up: bool) -> None:
        if not is_holding_up or client.is_cut:
            client.mark = None
            self._slow.pop(client, None)
            return
        mark = client.mark
        rate = client.look(now_s)
        if rate is not None and rate < self._rate_bytes_per_s_min:
            self._slow[client] = rate
        elif client.mark is not mark:
            self._slow.pop(client, None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._going_on)} go on, {self.cut_count} were cut>"


def _nothing() -> int:
    """Nothing waits in the kernel."""
    return 0
