"""Threads for what waits for clients: opening a fabric, and reaching memory over one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

THREADS = 32
THREADS_PER_IDENTITY_MAX = 4

P = ParamSpec("P")
T = TypeVar("T")


class FabricThreads:
    """Apart from all others, so that a client that stands still holds up nobody's disk or memory;
    each identity has a few, so that it holds up few of another's fabrics. Used in the event loop.
    """

    def __init__(
        self, threads: int = THREADS, per_identity_max: int = THREADS_PER_IDENTITY_MAX
    ) -> None:
        self._executor = ThreadPoolExecutor(threads, "fabric")
        self._per_identity_max = per_identity_max
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def start(
        self, identity: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> asyncio.Future[T]:
        """Wait until one of the identity's threads is free, and begin the call there.

        It goes on, and keeps its thread, when nobody waits for it any more.
        """
        turns = self._turns.get(identity)
        if turns is None:
            turns = self._turns[identity] = asyncio.Semaphore(self._per_identity_max)
        await turns.acquire()
        try:
            calling = self._executor.submit(function, *args, **kwargs)
        except BaseException:
            turns.release()
            raise
        called = asyncio.wrap_future(calling)
        called.add_done_callback(lambda _: turns.release())
        return called

    def __repr__(self) -> str:
        return f"<FabricThreads for {len(self._turns)} identities>"
