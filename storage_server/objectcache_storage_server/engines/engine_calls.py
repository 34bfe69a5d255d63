"""An engine's calls, in threads of their own: each of them blocks on the device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from objectcache_storage_server.engines.base import Engine

ENGINE_THREADS = 16  # calls that write, flush or look up

P = ParamSpec("P")
T = TypeVar("T")


class EngineCalls:
    """The engine, and whoever waits for it in the event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._executor = ThreadPoolExecutor(ENGINE_THREADS, "engine")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in a worker thread. If the caller is cancelled it still runs to its
        end.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    async def call_to_open(self, open_: Callable[[], T], close: Callable[[T], None]) -> T:
        """The same, for a call whose result must be closed: also where the caller is cancelled."""
        opening = asyncio.ensure_future(self.call(open_))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(lambda done: _close_opened(done, close))
            raise

    def close(self) -> None:
        """End the threads, then the engine; nothing may be running."""
        self._executor.shutdown()
        self.engine.close()

    def __repr__(self) -> str:
        return f"<EngineCalls of {self.engine.capabilities.name}>"


def _close_opened(opened: asyncio.Future[T], close: Callable[[T], None]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        close(opened.result())
