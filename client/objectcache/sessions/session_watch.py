"""Finds out that a storage server stands still while a client waits for it."""

from __future__ import annotations

import threading
from typing import Protocol

PING_INTERVAL_S = 2.0
SILENT_PINGS_MAX = 4  # that one after the other were answered by nothing at all


class WatchedSession(Protocol):
    """A session, as far as it is watched."""

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        ...

    @property
    def heard_count(self) -> int:
        """Messages that came."""
        ...

    @property
    def is_waited_for(self) -> bool:
        """Whether the server is to say something, or reads the session's memory."""
        ...

    @property
    def is_left(self) -> bool:
        """Whether nothing more is begun over it."""
        ...

    def ping(self) -> None:
        """Have it say something; never waits."""
        ...

    def give_up(self, reason: str) -> None:
        """End it."""
        ...


class SessionWatch:
    """A thread that pings a session while it is waited for, and gives up one that is silent, or
    that was left and is not waited for.
    """

    def __init__(self, session: WatchedSession) -> None:
        self._session = session
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="objectcache-session-watch", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()

    def _watch(self) -> None:
        heard_count, silent_pings, was_over = 0, 0, False
        while not self._ended.wait(PING_INTERVAL_S) and not self._session.ended:
            if self._session.heard_count != heard_count or not self._session.is_waited_for:
                heard_count, silent_pings = self._session.heard_count, 0
            is_over, was_over = was_over, self._session.is_left
            if not self._session.is_waited_for:
                if is_over:
                    self._session.give_up("the session was left")
                    return
                continue
            if silent_pings >= SILENT_PINGS_MAX:
                silent_s = silent_pings * PING_INTERVAL_S
                self._session.give_up(f"the storage server has said nothing for {silent_s:g} s")
                return
            self._session.ping()
            silent_pings += 1
