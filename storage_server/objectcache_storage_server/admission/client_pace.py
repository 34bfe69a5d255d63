"""Clients that are waited for, and cut where `judge_clients` says so. Used in the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from objectcache_schemas.errors import Busy
from objectcache_storage_server.admission.judge_clients import ClientRate, SlowestFirst

TICK_S = 0.25  # between two looks, each of which ends no more clients than there are who wait
RETRY_AFTER_S = 1.0

T = TypeVar("T")

logger = logging.getLogger("objectcache.storage_server.client_pace")


class ClientPace(ClientRate):
    """One client, as whoever waits for it sees it."""

    def __init__(self, tenant: str, rate_bytes_per_s_min: int, what: str) -> None:
        """`what` the client does, for the error: "took a body"."""
        super().__init__(tenant)
        self._rate_bytes_per_s_min = rate_bytes_per_s_min
        self._what = what
        self._timeout: asyncio.Timeout | None = None

    async def wait_for(self, client: Awaitable[T], timeout_s: float | None = None) -> T:
        """What the client is waited for. Raises `Busy` when it is cut, and `TimeoutError`."""
        if self.is_cut:
            self._timeout = asyncio.timeout(0)
        else:
            self._timeout = asyncio.timeout(timeout_s)
        self.waiting_begins(time.monotonic())
        try:
            async with self._timeout:
                return await client
        except TimeoutError as error:
            if self.is_cut and self._timeout.expired():
                raise self.error() from error
            raise
        finally:
            self.waiting_ends(time.monotonic())
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


class SlowClients(SlowestFirst[ClientPace]):
    """The bodies, or the puts, that go on."""

    def __init__(
        self, what: str, rate_bytes_per_s_min: int, holds_up: Callable[[str], bool]
    ) -> None:
        """`what` a client does, for the error."""
        super().__init__(rate_bytes_per_s_min, holds_up)
        self._what = what

    def add(self, tenant: str) -> ClientPace:
        """Watch another client until `remove`."""
        pace = ClientPace(tenant, self._rate_bytes_per_s_min, self._what)
        self.watch(pace)
        return pace


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
