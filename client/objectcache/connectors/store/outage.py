"""When the store is left alone, so that an engine does not wait for it again and again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from objectcache.gpu.device import DeviceFailed
from objectcache.landing.target_pool import MemoryInUse
from objectcache.pause import Pause
from objectcache_schemas.errors import Busy, DeliveryFailed, ObjectCacheError, Unavailable

LOG_INTERVAL_S = 30.0  # of failures that begin no pause

_OUT_OF_REACH = (Unavailable, Busy, DeliveryFailed)
_OF_THIS_PROCESS = (MemoryInUse, DeviceFailed)

T = TypeVar("T")


def forget_frames(error: BaseException) -> None:
    """Take the tracebacks off an error that is kept, and off its causes: their frames hold
    deliveries, and with them memory.
    """
    seen: set[int] = set()
    left = [error]
    while left:
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [other for other in (one.__cause__, one.__context__) if other is not None]


class Outage:
    """Stands before a connector's calls to its store: after one that found it out of reach, too
    busy or too slow, nothing is asked for a while. Thread-safe; one for all calls over one client.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._pause = Pause()
        self._silent_until_s = 0.0
        self.failure_count = 0

    @property
    def rest_s(self) -> float:
        """How much longer nothing is asked; 0 where the store is asked."""
        with self._lock:
            return self._pause.rest_s(time.monotonic())

    def call(self, what: str, work: Callable[[], T]) -> T:
        """Do what asks the store; its failure is noted under this name, and raised again.

        Raises `Unavailable` at once while the store is left alone.
        """
        if rest_s := self.rest_s:
            raise Unavailable(f"the store failed and is left alone for another {rest_s:.1f} s")
        try:
            result = work()
        except ObjectCacheError as error:
            self.failed(what, error)
            raise
        self.answered(what)
        return result

    def attempt(self, what: str, work: Callable[[], T], otherwise: T) -> T:
        """`call`, with an answer in the place of what the store is the cause of."""
        try:
            return self.call(what, work)
        except ObjectCacheError:
            return otherwise

    def failed(self, what: str, error: ObjectCacheError) -> None:
        """Note a failure of what `call` did not do; a refusal, a miss, memory of this process
        that was not to be had, or its GPU, begins no pause.
        """
        now_s = time.monotonic()
        pauses = isinstance(error, _OUT_OF_REACH) and not isinstance(error, _OF_THIS_PROCESS)
        with self._lock:
            self.failure_count += 1
            began_s = self._pause.rest_s(now_s)
            if pauses:
                self._pause.failed(what, now_s, error.details.retry_after_s or 0.0)
            rest_s = self._pause.rest_s(now_s)
            tells = began_s == 0.0 if pauses else now_s >= self._silent_until_s
            if tells and not pauses:
                self._silent_until_s = now_s + LOG_INTERVAL_S
        if tells:
            left = f"; the store is left alone for {rest_s:g} s" if pauses else ""
            self._logger.warning("%s failed (%s): %s%s", what, error.code, error.message, left)

    def answered(self, what: str) -> None:
        """Note the success of what `call` did not do."""
        with self._lock:
            self._pause.answered(what)

    def __repr__(self) -> str:
        return f"<Outage, {self.failure_count} failures, {self.rest_s:.1f} s to wait>"
