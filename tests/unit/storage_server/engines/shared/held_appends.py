"""Appends that a test lets go on, one by one, and the changes that wait behind them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from objectcache_schemas.errors import StorageFull
from objectcache_storage_server.engines.shared.log.make_record import WaitingChange
from tests.unit.storage_server.engines.shared.catalogs import Server, until

T = TypeVar("T")

TOO_LARGE_BYTES = 200_000  # for the store of these tests, and not for its records


class HeldAppends:
    """Has a server's appends wait; those of much are refused, as by a store that is full."""

    def __init__(self, server: Server) -> None:
        self.waiting = 0  # appends, since the start
        self._line = server.catalog._line
        self._tickets = threading.Semaphore(0)
        self._append = server.store.inner.append
        server.store.inner.append = self.append  # type: ignore[method-assign,assignment]

    def append(self, number: int, packed: bytes, deadline_s: float) -> bool:
        self.waiting += 1
        assert self._tickets.acquire(timeout=60)
        if len(packed) > TOO_LARGE_BYTES:
            raise StorageFull("the store is full")
        return self._append(number, packed, deadline_s)

    def let(self, count: int) -> None:
        """Let this many go on."""
        self._tickets.release(count)

    def in_line(self, place: int) -> WaitingChange:
        """The change at this place, the first of which is 1."""
        return self._line._line[place - 1]

    def queue(self, threads: ThreadPoolExecutor, call: Callable[[], T], place: int) -> Future[T]:
        """Begin a change, which is in line at this place when this returns."""
        future = threads.submit(call)
        until(lambda: len(self._line._line) == place)
        return future
