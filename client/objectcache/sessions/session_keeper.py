"""The session of a client and one transport: joined when it is needed, and again after it ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from objectcache.sessions.target_session import TargetSession
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.errors import AccessDenied, Busy, ObjectCacheError, Retry, Unavailable

RETRY_AFTER_S = 30.0  # somebody may change what does not change by itself
PAUSE_MIN_S, PAUSE_MAX_S = 0.1, 2.0  # after what passes by itself: a server that is starting, say

logger = logging.getLogger("objectcache.sessions.session_keeper")


class SessionKeeper:
    """Holds the client's session, joins one when it is first needed, and again after it ended.
    Where it is asked to move, another one is joined in a thread, and used once it is there.

    A failed try is remembered for a while, so that each fetch does not pay for it. Thread-safe.
    """

    def __init__(
        self, join: Callable[[], TargetSession], without: str, threads: ThreadReserve
    ) -> None:
        """`without` begins the messages that say why there is none."""
        self._join = join
        self._without = without
        self._threads = threads
        self._is_moving = False
        self._lock = threading.Lock()
        self._session: TargetSession | None = None
        self._left: list[TargetSession] = []  # that may not have ended yet
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
            held = self._session
            if held is not None and not held.ended:
                if held.is_asked_to_move and not self._is_moving:
                    held.is_asked_to_move, self._is_moving = False, True
                    self._threads.start(partial(self._move, held))
                return held
            return self._joined()

    def _joined(self) -> TargetSession:
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

    def _move(self, held: TargetSession) -> None:
        """Another session in the place of this one, which stays where there is none to be had."""
        joined: TargetSession | None = None
        try:
            joined = self._join()
        except ObjectCacheError as error:
            logger.info("the session does not move: %s", error.message)
        except Exception:
            logger.exception("moving the session failed")
        with self._lock:
            self._is_moving = False
            is_wanted = not self._closed and self._session is held
            if joined is not None and is_wanted:
                self._session = joined
                self._leave(held)
        if joined is not None and not is_wanted:
            joined.close()

    def leave(self, session: TargetSession) -> None:
        """The server of this session goes; the next one that is asked for is joined anew."""
        with self._lock:
            if self._session is session:
                self._session = None
            self._leave(session)

    def _leave(self, session: TargetSession) -> None:
        self._left = [one for one in self._left if not one.ended] + [session]
        session.leave()

    def _refusal(self) -> Unavailable:
        """The last failure, with what the server said of when to come again."""
        return Unavailable(self._refused, retry_after_s=self._retry_after_s)

    def _remember(self, error: ObjectCacheError) -> None:
        self._refused = f"{self._without}: {error.message}"
        self._retry_after_s = error.details.retry_after_s
        self._pause_s = pause_s(error, self._pause_s)
        self._refused_until_s = time.monotonic() + self._pause_s

    def close(self) -> None:
        """End the session, if there is one, and those that were left."""
        with self._lock:
            self._closed = True
            sessions, self._left = self._left, []
            if self._session is not None:
                sessions.append(self._session)
            self._session = None
        for session in sessions:
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
