"""A client's sessions with several storage servers at once, for deliveries that these share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial

from objectcache.sessions.target_session import TargetSession
from objectcache.thread_reserve import ThreadReserve
from objectcache_schemas.errors import ObjectCacheError

LISTED_S = 5.0  # how long a list of servers is believed
JOIN_S = 2.0  # how long a delivery waits for sessions
REFUSED_S = 5.0  # before a server that could not be joined is tried again

logger = logging.getLogger("objectcache.sessions.server_sessions")


class ServerSessions:
    """One session with each storage server that can be had, joined when they are first needed.
    Thread-safe.
    """

    def __init__(
        self,
        listed: Callable[[], Iterable[bytes]],
        join: Callable[[bytes], TargetSession],
        threads: ThreadReserve,
    ) -> None:
        """`listed` asks for the ids of the servers, `join` joins a session with one."""
        self._listed = listed
        self._join = join
        self._threads = threads
        self._lock = threading.Lock()
        self._sessions: dict[bytes, TargetSession] = {}
        self._left: list[TargetSession] = []  # that may not have ended yet
        self._joining: dict[bytes, Future[None]] = {}
        self._ids: list[bytes] = []
        self._listed_until_s = 0.0
        self._refused_until_s: dict[bytes, float] = {}
        self._closed = False

    def sessions(self) -> Sequence[TargetSession]:
        """Those that there are now, one a server; fewer where a server is out of reach. Waits up to
        JOIN_S for those that are being joined. Raises nothing.
        """
        with self._lock:
            if self._closed:
                return ()
            self._list_again()
            joining = [self._begin_to_join(one) for one in self._ids if not self._is_joined(one)]
        wait([future for future in joining if future is not None], JOIN_S)
        with self._lock:
            return [self._sessions[one] for one in self._ids if self._is_joined(one)]

    def leave(self, session: TargetSession) -> None:
        """The server of this session goes, so it ends as soon as nothing is waited for."""
        with self._lock:
            self._listed_until_s = 0.0
            for server_id, known in list(self._sessions.items()):
                if known is session:
                    del self._sessions[server_id]
                    self._refuse(server_id)
            self._leave(session)

    def _leave(self, session: TargetSession) -> None:
        self._left = [one for one in self._left if not one.ended] + [session]
        session.leave()

    def close(self) -> None:
        """End all. Repeating has no effect."""
        with self._lock:
            self._closed = True
            sessions = [*self._sessions.values(), *self._left]
            self._sessions, self._left = {}, []
        for session in sessions:
            session.close()

    def _list_again(self) -> None:
        now_s = time.monotonic()
        if now_s < self._listed_until_s:
            return
        self._listed_until_s = now_s + LISTED_S
        try:
            self._ids = list(self._listed())
        except ObjectCacheError as error:
            logger.debug("no list of storage servers: %s", error.message)
            self._ids = [one for one, session in self._sessions.items() if not session.ended]
        for server_id in self._sessions.keys() - self._ids:
            self._leave(self._sessions.pop(server_id))
        for server_id in self._refused_until_s.keys() - self._ids:
            del self._refused_until_s[server_id]

    def _is_joined(self, server_id: bytes) -> bool:
        known = self._sessions.get(server_id)
        return known is not None and not known.ended

    def _begin_to_join(self, server_id: bytes) -> Future[None] | None:
        """Join in a thread, for a server may stand still; None where it is not to be tried yet."""
        if time.monotonic() < self._refused_until_s.get(server_id, 0.0):
            return None
        joining = self._joining.get(server_id)
        if joining is None:
            joining = self._joining[server_id] = Future()
            self._threads.start(partial(self._join_one, server_id, joining))
        return joining

    def _join_one(self, server_id: bytes, joining: Future[None]) -> None:
        session: TargetSession | None = None
        try:
            session = self._join(server_id)
        except ObjectCacheError as error:
            logger.info("no session with storage server %s: %s", server_id.hex(), error.message)
        except Exception:
            logger.exception("joining a session failed")
        with self._lock:
            del self._joining[server_id]
            is_wanted = not self._closed and server_id in self._ids
            if session is None:
                self._refuse(server_id)
            elif is_wanted:
                self._sessions[server_id] = session
        if session is not None and not is_wanted:
            session.close()
        joining.set_result(None)

    def _refuse(self, server_id: bytes) -> None:
        self._refused_until_s[server_id] = time.monotonic() + REFUSED_S

    def __repr__(self) -> str:
        return f"<ServerSessions {len(self._sessions)}/{len(self._ids)} joined>"
