"""Where deliveries wait for memory: first come, first served.

`MemoryLine` decides and knows neither tasks nor time; `MemoryGrants` has tasks wait for what it
decides. Whoever waits holds its opened objects and its place at the entrance, no memory, and
whoever holds memory never waits here: so the line always moves on.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from objectcache_schemas.errors import Busy
from objectcache_storage_server.buffers import BufferPool
from objectcache_storage_server.connections.sockets import ConnectionEnded
from objectcache_storage_server.entrance import Gone, stopping

FULL_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class MemoryWish:
    """What a delivery can use: up to `wanted_bytes`, in steps of `least_bytes`, one at least."""

    wanted_bytes: int
    least_bytes: int


class Turn:
    """One request's wish; `granted_bytes` is None for as long as it waits.

    `settled` is called once, under the line's lock, when a turn that waited is granted.
    """

    def __init__(self, wish: MemoryWish, settled: Callable[[], object]) -> None:
        self.wish = wish
        self.granted_bytes: int | None = None
        self.settled = settled


class MemoryLine:
    """Who gets the pool's memory next. Nobody overtakes, so a large wish is not starved."""

    def __init__(self, pool: BufferPool, waiting_max: int) -> None:
        self._pool = pool
        self._waiting_max = waiting_max
        self._turns: deque[Turn] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._turns)

    def ask(self, wish: MemoryWish, settled: Callable[[], object]) -> Turn:
        """A turn that was granted, or one that waits. Raises `Busy` where too many wait."""
        turn = Turn(wish, settled)
        if not self._turns or not wish.least_bytes:
            turn.granted_bytes = self._granted(wish)
        if turn.granted_bytes is None:
            if len(self._turns) >= self._waiting_max:
                raise Busy(
                    f"{self._pool.shortage}, and {len(self._turns)} requests wait for memory "
                    f"(scheduler.queue_max is {self._waiting_max})",
                    retry_after_s=FULL_RETRY_AFTER_S,
                )
            self._turns.append(turn)
        return turn

    def advance(self) -> None:
        """Memory came back, or somebody left: grant as many turns as fit, in their order."""
        while self._turns:
            turn = self._turns[0]
            turn.granted_bytes = self._granted(turn.wish)
            if turn.granted_bytes is None:
                return
            self._turns.popleft()
            turn.settled()

    def leave(self, turn: Turn) -> int:
        """The turn is wanted no more; returns what it was granted, for the pool to take back."""
        if turn.granted_bytes is None:
            self._turns.remove(turn)
        return turn.granted_bytes or 0

    def _granted(self, wish: MemoryWish) -> int | None:
        if not wish.least_bytes:
            return 0
        return self._pool.grant(wish.wanted_bytes, wish.least_bytes) or None


class MemoryGrants:
    """The line of a server, as its tasks see it.

    What `grant` returns goes back with the pool's `release`, from any thread.
    """

    def __init__(
        self, pool: BufferPool, waiting_max: int, timeout_s: float, closed: asyncio.Event
    ) -> None:
        """Once `closed` is set nobody waits any more."""
        self._pool = pool
        self._line = MemoryLine(pool, waiting_max)
        self._timeout_s = timeout_s
        self._closed = closed
        self._lock = threading.Lock()
        pool.on_release = self._advance

    @property
    def waiting(self) -> int:
        """Requests that wait for memory."""
        return self._line.waiting

    async def grant(self, wish: MemoryWish, gone: Gone) -> int:
        """Wait for memory; returns the bytes, from `least_bytes` to `wanted_bytes`.

        Raises `Busy` where too many wait or the wait is too long, `Unavailable` once the server
        drains, and `ConnectionEnded` when `gone` returns first. Whoever is cancelled holds none,
        and takes nobody's place.
        """
        loop, settled = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            turn = self._line.ask(wish, partial(loop.call_soon_threadsafe, settled.set))
        if turn.granted_bytes is not None:
            return turn.granted_bytes
        try:
            return await self._wait(turn, settled, gone)
        except BaseException:
            with self._lock:
                unused_bytes = self._line.leave(turn)
            self._pool.release(unused_bytes)  # also where it is 0: those behind it may fit now
            raise

    async def _wait(self, turn: Turn, settled: asyncio.Event, gone: Gone) -> int:
        waits = (settled.wait(), gone(), self._closed.wait())
        tasks = [asyncio.ensure_future(one) for one in waits]
        try:
            await asyncio.wait(tasks, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            is_gone = tasks[1].done()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if turn.granted_bytes is not None:
            return turn.granted_bytes
        if is_gone:
            raise ConnectionEnded
        if self._closed.is_set():
            raise stopping()
        raise Busy(
            f"{self._pool.shortage}, and no room came for {self._timeout_s:g} s "
            "(scheduler.queue_timeout_s)",
            retry_after_s=self._timeout_s,
        )

    def _advance(self) -> None:
        with self._lock:
            self._line.advance()

    def __repr__(self) -> str:
        return f"<MemoryGrants {self.waiting} waiting, {self._pool!r}>"
