"""The session of a client and one transport: joined when it is needed, and again after it ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.errors import AccessDenied, Busy, ObjectCacheError, Retry, Unavailable

RETRY_AFTER_S = 30.0  # somebody may change what does not change by itself
PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 2.0  # after what passes by itself: a server that is starting, say


class SessionKeeper:
    """Holds the client's session, joins one when it is first needed, and again after it ended.

    A failed try is remembered for a while, so that each fetch does not pay for it. Thread-safe.
    """

    def __init__(self, join: Callable[[], TargetSession], without: str) -> None:
        """`without` begins the messages that say why there is none."""
        self._join = join
        self._without = without
        self._lock = threading.Lock()
        self._session: TargetSession | None = None
        self._refused = ""
        self._retry_after_s: float | None = None
        self._refused_until_s = 0.0
        self._pause_s = 0.0
        self._closed = False

    def session(self) -> TargetSession:
        """The session. Raises `AccessDenied` where this identity may have none, and `Unavailable`
        with the reason of any other failure.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the client is closed")
            if self._session is not None and not self._session.ended:
                return self._session
            if time.monotonic() < self._refused_until_s:
                raise self._refusal()
            try:
                self._session = self._join()
            except AccessDenied:  # an operator may grant it at any time, and a key be enabled again
                raise
            except ObjectCacheError as error:
                self._remember(error)
                raise self._refusal() from error
            self._refused, self._pause_s = "", 0.0
            return self._session

    def _refusal(self) -> Unavailable:
        """The last failure, with what the server said of when to come again."""
        return Unavailable(self._refused, retry_after_s=self._retry_after_s)

    def _remember(self, error: ObjectCacheError) -> None:
        self._refused = f"{self._without}: {error.message}"
        self._retry_after_s = error.details.retry_after_s
        self._pause_s = pause_s(error, self._pause_s)
        self._refused_until_s = time.monotonic() + self._pause_s

    def close(self) -> None:
        """End the session, if there is one."""
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def __repr__(self) -> str:
        return f"<SessionKeeper {self._refused or self._session or 'not asked yet'}>"


def pause_s(error: ObjectCacheError, last_s: float) -> float:
    """How long to join no session after this failure; `last_s` is the pause before it, or 0."""
    if isinstance(error, Busy):
        return 0.0
    if error.row.retry is Retry.NEVER:
        return RETRY_AFTER_S
    return min(max(PAUSE_MIN_S, 2 * last_s), PAUSE_MAX_S)
