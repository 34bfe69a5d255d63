"""Whether shared memory can be had, decided once and remembered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from objectcache.channel.responses import SessionReply
from objectcache.memory.target_session import TargetSession
from objectcache_schemas.errors import Busy, ObjectCacheError, Unavailable

RETRY_AFTER_S = 30.0  # a server may come to this host's reach, but asking costs two round trips


class SessionKeeper:
    """Holds the client's session, joins one when it is first needed, and again after it ended.

    A failed try is remembered for a while, so that each fetch does not pay for it. Thread-safe.
    """

    def __init__(self, invite: Callable[[], SessionReply], timeout_s: float) -> None:
        self._invite = invite
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._session: TargetSession | None = None
        self._refused: Unavailable | None = None
        self._refused_until_s = 0.0
        self._closed = False

    def session(self) -> TargetSession:
        """The session. Raises `Unavailable` with the reason why there is none."""
        with self._lock:
            if self._closed:
                raise Unavailable("the client is closed")
            if self._session is not None and not self._session.ended:
                return self._session
            if self._refused is not None and time.monotonic() < self._refused_until_s:
                raise Unavailable(self._refused.message)
            self._session = self._join()
            self._refused = None
            return self._session

    def _join(self) -> TargetSession:
        try:
            invitation = self._invite()
        except (Busy, Unavailable) as error:  # says nothing about shared memory
            raise Unavailable(_no_shared_memory(error)) from error
        except ObjectCacheError as error:
            raise self._refuse(error) from error
        try:
            return TargetSession.join(invitation, self._timeout_s)
        except Unavailable as error:
            raise self._refuse(error) from error

    def _refuse(self, error: ObjectCacheError) -> Unavailable:
        self._refused = Unavailable(_no_shared_memory(error))
        self._refused_until_s = time.monotonic() + RETRY_AFTER_S
        return self._refused

    def close(self) -> None:
        """End the session, if there is one."""
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def __repr__(self) -> str:
        state = self._refused.message if self._refused else (self._session or "not asked yet")
        return f"<SessionKeeper {state}>"


def _no_shared_memory(error: ObjectCacheError) -> str:
    return f"no shared memory: {error.message}"
