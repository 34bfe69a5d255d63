"""Which clients are so slow with a body or a put that they count as stalled.

Slowness harms nobody as long as nobody waits for what a client holds. Where somebody does who holds
less, a client below a least rate for a window is told to end. Only time that was spent waiting
for it counts: what a schedule or a device held up is not its fault.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from objectcache_schemas.errors import Busy

WINDOW_S = 2.0  # of a client that is watched
WAITING_PART_MIN = 0.5  # of the window, below which nothing can be said of the client
TICK_S = 0.25  # between two looks, each of which ends no more clients than there are who wait
RETRY_AFTER_S = 1.0

T = TypeVar("T")

logger = logging.getLogger("objectcache.storage_server.client_pace")


@dataclass(frozen=True, slots=True)
class _Mark:
    """What a pace had come to when it was last looked at."""

    at_s: float
    arrived_bytes: int
    waited_s: float


class ClientPace:
    """How fast one client takes a body, or sends a put. Used in the event loop."""

    def __init__(self, tenant: str, rate_bytes_per_s_min: int, what: str) -> None:
        """`what` the client does, for the error: "took a body"."""
        self.tenant = tenant
        self.moved_bytes = 0
        self.unsent_bytes: Callable[[], int] = _nothing
        self.is_cut = False
        self._rate_bytes_per_s_min = rate_bytes_per_s_min
        self._what = what
        self._waited_s = 0.0
        self._waits_since_s: float | None = None
        self._timeout: asyncio.Timeout | None = None
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

    async def wait_for(self, client: Awaitable[T], timeout_s: float | None = None) -> T:
        """What the client is waited for. Raises `Busy` when it is cut, and `TimeoutError`."""
        if self.is_cut:
            self._timeout = asyncio.timeout(0)
        else:
            self._timeout = asyncio.timeout(timeout_s)
        self._waits_since_s = time.monotonic()
        try:
            async with self._timeout:
                return await client
        except TimeoutError as error:
            if self.is_cut and self._timeout.expired():
                raise self.error() from error
            raise
        finally:
            now_s = time.monotonic()
            self._waited_s, self._waits_since_s = self.waited_s(now_s), None
            self._timeout = None

    def error(self) -> Busy:
        """Why it was cut."""
        return Busy(
            f"the client {self._what} at less than {self._rate_bytes_per_s_min} bytes/s while "
            "others waited (storage.client_rate_bytes_per_s_min); try again, or lower it",
            retry_after_s=RETRY_AFTER_S,
        )

    def cut(self) -> None:
        """End it: whoever waits for the client waits no more. A second call has no effect."""
        self.is_cut = True
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

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
        return f"<ClientPace {self.tenant}: {self.moved_bytes} bytes>"


class SlowClients:
    """The bodies, or the puts, that go on."""

    def __init__(
        self, what: str, rate_bytes_per_s_min: int, holds_up: Callable[[str], bool]
    ) -> None:
        """`holds_up` says of a tenant whether one waits who holds less, or itself."""
        self.cut_count = 0
        self._what = what
        self._rate_bytes_per_s_min = rate_bytes_per_s_min
        self._holds_up = holds_up
        self._paces: dict[ClientPace, None] = {}
        self._slow: dict[ClientPace, float] = {}  # below the rate, and not cut yet

    @property
    def watched(self) -> int:
        """How many go on."""
        return len(self._paces)

    def add(self, tenant: str) -> ClientPace:
        """Watch another client until `remove`."""
        pace = ClientPace(tenant, self._rate_bytes_per_s_min, self._what)
        self._paces[pace] = None
        return pace

    def remove(self, pace: ClientPace) -> None:
        """It has ended. A second call has no effect."""
        self._paces.pop(pace, None)
        self._slow.pop(pace, None)

    def slowest(self, now_s: float, most: int) -> list[ClientPace]:
        """The clients to be cut now, at most so many."""
        holding_up = {tenant: self._holds_up(tenant) for tenant in {p.tenant for p in self._paces}}
        for pace in self._paces:
            self._judge(pace, now_s, is_holding_up=holding_up[pace.tenant])
        found = sorted(self._slow, key=self._slow.__getitem__)[:most]
        for pace in found:
            del self._slow[pace]
        self.cut_count += len(found)
        return found

    def _judge(self, pace: ClientPace, now_s: float, *, is_holding_up: bool) -> None:
        if not is_holding_up or pace.is_cut:
            pace.mark = None
            self._slow.pop(pace, None)
            return
        mark = pace.mark
        rate = pace.look(now_s)
        if rate is not None and rate < self._rate_bytes_per_s_min:
            self._slow[pace] = rate
        elif pace.mark is not mark:
            self._slow.pop(pace, None)

    def __repr__(self) -> str:
        return f"<SlowClients: {len(self._paces)} go on, {self.cut_count} were cut>"


async def watch(kinds: dict[SlowClients, Callable[[], int]]) -> None:
    """Cut the slowest of each kind, as often as TICK_S passes, for ever. What a kind maps to says
    how many wait.
    """
    while True:
        await asyncio.sleep(TICK_S)
        try:
            for clients, waiting in kinds.items():
                for pace in clients.slowest(time.monotonic(), waiting()):
                    pace.cut()
        except Exception:  # without it no slow client would be cut any more
            logger.exception("slow clients could not be looked at")


def _nothing() -> int:
    """Nothing waits in the kernel."""
    return 0
