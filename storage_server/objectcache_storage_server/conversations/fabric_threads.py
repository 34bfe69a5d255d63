"""Threads for what waits for clients: opening a fabric, and reaching memory over one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from objectcache_storage_server.admission.fair_line import Counted
from objectcache_storage_server.admission.line_waits import LineWaits

THREADS = 32

P = ParamSpec("P")
T = TypeVar("T")


class FabricThreads:
    """Apart from all others, so that a client that stands still holds up nobody's disk or memory;
    each identity has a share, so that it holds up no other's fabrics. Used in the event loop.
    """

    def __init__(self, waiting_max: int, threads: int = THREADS) -> None:
        """`waiting_max`: storage.sessions_max, each of which asks for one thing at a time."""
        self._executor = ThreadPoolExecutor(threads, "fabric")
        self._waits = LineWaits(Counted("threads of fabrics", "their number", threads), waiting_max)

    async def start(
        self, identity: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Wait until the identity may have a thread, and begin the call there.

        It goes on, and keeps its thread, when nobody waits for it any more.
        """
        await self._waits.take(identity, 1)
        try:
            calling = self._executor.submit(function, *args, **kwargs)
        except BaseException:
            self._waits.give_back(identity, 1)
            raise
        called = asyncio.wrap_future(calling)
        called.add_done_callback(lambda _: self._waits.give_back(identity, 1))
        return called

    def __repr__(self) -> str:
        return f"<FabricThreads {self._waits!r}>"
