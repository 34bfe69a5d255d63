"""A get that goes over a session itself, as its client sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from objectcache_schemas.errors import ObjectCacheError, Unavailable
from objectcache_schemas.messages.sessions import GetBegun, GetEnded


class SessionGet:
    """What the server says of one get: that it has begun, and how it ended. Thread-safe.

    The session tells it, on its thread.
    """

    def __init__(self, tag: int) -> None:
        self.tag = tag
        self._begun: Future[GetBegun] = Future()
        self._lock = threading.Lock()
        self._is_over = False
        self._ended: GetEnded | None = None  # None where it is over: it was lost
        self._told: Callable[[GetEnded | None], None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended, was refused or was lost."""
        return self._is_over

    def begun(self, message: GetBegun) -> None:
        """The server has accepted it."""
        if not self._begun.done():
            self._begun.set_result(message)

    def ended(self, message: GetEnded) -> None:
        """The server writes nothing for it any more. Before it began that is a refusal."""
        if not self._begun.done():
            refusal = ObjectCacheError("the server ended a get that it had not begun")
            if message.error is not None:
                refusal = ObjectCacheError.from_wire(message.error)
            self._begun.set_exception(refusal)
        self._end(message)

    def lost(self, reason: str) -> None:
        """The session has ended, and nobody knows whether the server still writes."""
        if not self._begun.done():
            self._begun.set_exception(Unavailable(reason))
        self._end(None)

    def _end(self, ended: GetEnded | None) -> None:
        with self._lock:
            self._is_over, self._ended = True, ended
            # Let go of: it holds the memory of a delivery, which holds this.
            told, self._told = self._told, None
        if told is not None:
            told(ended)

    def wait_begun(self, timeout_s: float) -> GetBegun:
        """How it began. Raises the server's refusal, and `Unavailable` where the session ends or
        nothing is said for `timeout_s`.
        """
        try:
            return self._begun.result(timeout_s)
        except FutureTimeoutError as error:
            raise Unavailable(f"no answer to a get over the session for {timeout_s} s") from error

    def when_ended(self, told: Callable[[GetEnded | None], None]) -> None:
        """Have `told` called once, on any thread, with how it ended; with None when it was lost."""
        with self._lock:
            if not self._is_over:
                self._told = told
                return
        told(self._ended)
