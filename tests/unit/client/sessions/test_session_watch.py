"""What ends a session that was left."""

from __future__ import annotations

import threading

import pytest

from objectcache.sessions import session_watch
from objectcache.sessions.session_watch import SessionWatch

DEADLINE_S = 30.0


class Watched:
    """A session that answers each ping."""

    def __init__(self) -> None:
        self.ended = False
        self.heard_count = 0
        self.is_waited_for = True
        self.is_left = False
        self.over, self.pinged = threading.Event(), threading.Semaphore(0)

    def ping(self) -> None:
        self.heard_count += 1
        self.pinged.release()

    def give_up(self, reason: str) -> None:
        assert reason == "the session was left"
        self.ended = True
        self.over.set()


def test_a_session_that_was_left_ends_when_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_watch, "PING_INTERVAL_S", 0.005)
    session = Watched()
    watch = SessionWatch(session)
    session.is_left = True
    for _ in range(4):  # turns of the watch
        assert session.pinged.acquire(timeout=DEADLINE_S)
    assert not session.over.is_set()
    session.is_waited_for = False
    assert session.over.wait(DEADLINE_S)
    watch.close()


def test_a_session_that_is_held_stays_while_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_watch, "PING_INTERVAL_S", 0.005)
    session = Watched()
    session.is_waited_for = False
    watch = SessionWatch(session)
    assert not session.over.wait(0.05)
    session.is_left = True
    assert session.over.wait(DEADLINE_S)
    watch.close()
