"""Where tasks wait in a `FairLine`: for memory, for a put's slot, for a thread.

What is given back may come from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Generic, TypeVar

from objectcache_runtime.first_of import first_of
from objectcache_runtime.networking.stream_socket import ConnectionEnded
from objectcache_schemas.errors import Busy
from objectcache_storage_server.admission.entrance import Gone, stopping
from objectcache_storage_server.admission.fair_line import FairLine, Scarce, Turn

W = TypeVar("W")


class LineWaits(Generic[W]):
    """The line before one scarce thing of a server, as its tasks see it."""

    def __init__(
        self,
        scarce: Scarce[W],
        waiting_max: int,
        timeout_s: float | None = None,
        closed: asyncio.Event | None = None,
    ) -> None:
        """Once `closed` is set nobody waits any more. Without `timeout_s` a wait has no end."""
        self._scarce = scarce
        self._line = FairLine(scarce, waiting_max)
        self._timeout_s = timeout_s
        self._closed = closed or asyncio.Event()
        self._lock = threading.RLock()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._line.waiting

    async def take(self, tenant: str, wish: W, gone: Gone | None = None) -> int:
        """Wait for it; `give_back` ends what was taken.

        Raises `Busy` where too many wait or the wait is too long, `Unavailable` once the server
        drains, and `ConnectionEnded` when `gone` returns first. Whoever is cancelled holds none,
        and takes nobody's place.
        """
        loop, settled = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            turn = self._line.ask(tenant, wish, partial(loop.call_soon_threadsafe, settled.set))
        if turn.taken is not None:
            return turn.taken
        try:
            return await self._wait(turn, settled, gone or _never)
        except BaseException:
            with self._lock:
                unused = self._line.leave(turn)
                if turn.taken is not None:
                    self._line.give_back(tenant, unused)
                self._line.advance()  # those behind it may fit now, whatever it held
            raise

    def take_now(self, tenant: str, wish: W) -> int:
        """The same without waiting, from any thread: raises `Busy` where others would wait."""
        with self._lock:
            turn = self._line.ask(tenant, wish, _nobody)
            if turn.taken is not None:
                return turn.taken
            self._line.leave(turn)
            raise Busy(self._scarce.shortage(tenant), retry_after_s=1.0)

    def give_back(self, tenant: str, taken: int) -> None:
        """Give it back, or a part of it; those who wait have theirs."""
        with self._lock:
            self._line.give_back(tenant, taken)

    def advance(self) -> None:
        """There is more of it than there was."""
        with self._lock:
            self._line.advance()

    def is_wanted_more(self, tenant: str) -> bool:
        """Whether a tenant that holds less than this one waits."""
        if not self._line.waiting:
            return False
        with self._lock:
            return self._line.is_wanted_more(tenant)

    def is_held_from_others(self, tenant: str) -> bool:
        """Whether a tenant that holds less than this one waits, or a request of its own."""
        if not self._line.waiting:
            return False
        with self._lock:
            return self._line.is_held_from_others(tenant)

    async def _wait(self, turn: Turn[W], settled: asyncio.Event, gone: Gone) -> int:
        waits = (gone(), settled.wait(), self._closed.wait())
        is_gone, *_ = await first_of(*waits, timeout_s=self._timeout_s)
        if turn.taken is not None:
            return turn.taken
        if is_gone:
            raise ConnectionEnded
        if self._closed.is_set():
            raise stopping()
        assert self._timeout_s is not None
        raise Busy(
            f"{self._scarce.shortage(turn.tenant)}, and no room came for {self._timeout_s:g} s "
            "(scheduler.queue_timeout_s)",
            retry_after_s=self._timeout_s,
        )

    def __repr__(self) -> str:
        return f"<LineWaits {self.waiting} wait for {self._scarce.name}>"


async def _never() -> None:
    """Whoever asks stays."""
    await asyncio.Event().wait()


def _nobody() -> None:
    """Nobody is told of the turn."""
