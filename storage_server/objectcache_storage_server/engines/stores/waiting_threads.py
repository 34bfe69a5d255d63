"""Threads for calls of a system that may never answer, so that whoever asks waits for its deadline
and no longer.

A call that hangs keeps its thread, and nothing ends it: threads are few, what waits for one is
bounded, and none of them holds up the end of the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.stores.store_calls import check_deadline

T = TypeVar("T")

WAITING_MAX = 4096  # calls without a thread: what a full load has is some hundred
JOIN_S = 5.0  # that `close` waits for calls which should have ended


class WaitingThreads:
    """`count` threads, started as they are needed."""

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._changed = threading.Condition()
        self._waiting: dict[Future[Any], Callable[[], Any]] = {}  # in order
        self._threads: list[threading.Thread] = []
        self._idle_count = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<WaitingThreads {self._name}: {len(self._threads)} of {self._count}>"

    def begin(self, action: Callable[[], T]) -> Future[T]:
        """Have a thread carry out `action`; one that is cancelled before is forgotten, with all it
        holds. Raises `Unavailable` where too many calls wait.
        """
        future: Future[T] = Future()
        with self._changed:
            if len(self._waiting) >= WAITING_MAX:
                raise Unavailable(
                    f"{self._name}: the store does not answer, {WAITING_MAX} calls wait"
                )
            self._waiting[future] = action
            if self._idle_count < len(self._waiting):
                self._start_thread()
            self._changed.notify()
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._changed:
            self._waiting.pop(future, None)

    def call(self, operation: str, deadline_s: float, action: Callable[[], T]) -> T:
        """What `action` returns or raises. Raises `StoreTimeout` at the deadline: `action` may go
        on then, unless it had not begun.
        """
        check_deadline(deadline_s, operation)
        return self.result(self.begin(action), operation, deadline_s)

    def result(self, future: Future[T], operation: str, deadline_s: float) -> T:
        """What a call that was begun returns or raises; see `call`."""
        left_s = min(deadline_s - time.monotonic(), threading.TIMEOUT_MAX)
        try:
            return future.result(max(left_s, 0.0))
        except TimeoutError as error:
            if future.cancel() or not future.done():
                raise StoreTimeout(f"{operation}: no answer in time") from error
            return future.result()

    def close(self) -> None:
        """End the threads. One that hangs is left behind."""
        with self._changed:
            self._is_closed = True
            threads = list(self._threads)
            self._changed.notify_all()
        end_s = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(end_s - time.monotonic(), 0.0))

    def _start_thread(self) -> None:
        """Under the lock."""
        if len(self._threads) < self._count and not self._is_closed:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The call that has waited longest; none when the threads are to end."""
        with self._changed:
            self._idle_count += 1
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            self._idle_count -= 1
            if not self._waiting:
                return None
            future = next(iter(self._waiting))
            return future, self._waiting.pop(future)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            future, action = task
            if future.set_running_or_notify_cancel():
                try:
                    result = action()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del task, future, action  # what it holds is not kept until the next one comes
