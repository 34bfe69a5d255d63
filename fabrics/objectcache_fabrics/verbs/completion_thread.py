"""The thread that hears of completions, by descriptors of the device, and of time that passes."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

logger = logging.getLogger("objectcache.fabrics.verbs")


class Listener(Protocol):
    """Whoever has a descriptor to be watched. Called in the thread; must not raise."""

    @property
    def descriptor(self) -> int:
        """Readable when something has happened."""
        ...

    def happened(self) -> None:
        """The descriptor is readable."""
        ...

    def time_passed(self, now_s: float) -> None:
        """A tick; `now_s` is of the monotonic clock."""
        ...


class CompletionThread:
    """Watches descriptors and ticks, and calls back whom it is asked to."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)
        self._listeners: dict[int, Listener] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="verbs", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Have a function called in the thread, soon; from any thread."""
        self._calls.append(function)
        os.eventfd_write(self._wake, 1)

    def watch(self, listener: Listener) -> None:
        """Begin to call a listener; from any thread."""
        self.call(lambda: self._add(listener))

    def _add(self, listener: Listener) -> None:
        self._listeners[listener.descriptor] = listener
        self._poll.register(listener.descriptor, select.EPOLLIN)
        listener.happened()  # what happened before is not told

    def forget(self, listener: Listener) -> None:
        """Never call a listener again; in the thread, before its descriptor is closed."""
        assert threading.current_thread() is self._thread
        if self._listeners.pop(listener.descriptor, None) is not None:
            self._poll.unregister(listener.descriptor)

    def _run(self) -> None:
        next_tick_s = time.monotonic() + self._tick_s
        while not self._closed or self._calls or self._listeners:
            wait_s = max(0.0, next_tick_s - time.monotonic()) if self._listeners else -1
            self._turn(self._poll.poll(wait_s))
            if time.monotonic() >= next_tick_s:
                self._tick()
                next_tick_s = time.monotonic() + self._tick_s

    def _turn(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, _ in ready:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor in self._listeners:  # not forgotten by one before it
                self._guarded(self._listeners[descriptor].happened)
        while self._calls:
            self._guarded(self._calls.popleft())

    def _tick(self) -> None:
        now_s = time.monotonic()
        for listener in list(self._listeners.values()):
            self._guarded(partial(listener.time_passed, now_s))

    @staticmethod
    def _guarded(function: Callable[[], None]) -> None:
        """A defect must not end the thread: all connections would hang."""
        try:
            function()
        except Exception:
            logger.exception("the thread of verbs goes on after a defect")

    def close(self) -> None:
        """End, once all that was asked for is carried out and every listener forgotten."""
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._poll.close()
        os.close(self._wake)
