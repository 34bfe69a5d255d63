"""Sessions that are asked to move, because another server of the store has clearly fewer: one that
was added has none. The client goes when it next needs its session, and has another one by then.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from objectcache_storage_server.conversations.sessions import SessionServer
from objectcache_storage_server.fleet.own_state import OwnState

FEW = 0.85  # of the mean: while every server has as many, sessions stay where they are
ASKED_PER_S_MAX = 10.0  # by all servers together: whoever they go to has their memory to register
MOVING_S = 30.0  # for which a session that was asked counts as gone
ASKED_AGAIN_S = 600.0  # a client that does not need its session, or has one with each server
IN_VAIN_MAX = 5  # sessions that went, while as many are open: their clients cannot get elsewhere


class MovableSession(Protocol):
    """A session, as far as it is chosen."""

    asked_to_move_s: float

    @property
    def is_local(self) -> bool:
        """Whether servers of this host alone can have it."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs for it now."""
        ...


S = TypeVar("S", bound=MovableSession)


def surplus(own: int, others: Sequence[int]) -> int:
    """How many sessions a server has over its part, where one of the others has few."""
    mean = (own + sum(others)) / (1 + len(others))
    if not others or min(others) >= FEW * mean:
        return 0
    return max(0, own - math.ceil(mean))


def session_to_ask(
    sessions: Collection[S], others: Sequence[int], neighbours: Sequence[int], now_s: float
) -> S | None:
    """The first idle one that may go, where there are too many; `others` are how many sessions each
    other server has, `neighbours` those of them on this host.
    """
    staying = sum(now_s - one.asked_to_move_s > MOVING_S for one in sessions)
    too_many = {True: surplus(staying, neighbours) > 0, False: surplus(staying, others) > 0}
    if not any(too_many.values()):
        return None
    for session in sessions:
        was_asked = now_s - session.asked_to_move_s <= ASKED_AGAIN_S
        if too_many[session.is_local] and not was_asked and session.is_idle:
            return session
    return None


def asking_interval_s(servers: int) -> float:
    """How long a server waits between two sessions that it asks."""
    return max(1.0, servers / ASKED_PER_S_MAX)


class AskingRound:
    """Stops asking where clients that went come back, because they cannot reach the server that has
    few sessions: until fewer are open, or for ASKED_AGAIN_S.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._begun_s = self._asked_s = -math.inf
        self._open_then = 0

    def allows(self, sessions: Collection[MovableSession], now_s: float) -> bool:
        """Whether one may be asked now."""
        if len(sessions) < self._open_then or now_s - self._asked_s > ASKED_AGAIN_S:
            self._asked = 0
        staying = sum(one.asked_to_move_s >= self._begun_s for one in sessions)
        return self._asked - staying < IN_VAIN_MAX

    def asked(self, sessions: Collection[MovableSession], now_s: float) -> None:
        """One of these was asked."""
        if self._asked == 0:
            self._begun_s, self._open_then = now_s, len(sessions)
        self._asked += 1
        self._asked_s = now_s


class SessionSpreader:
    """Asks the sessions of one server, the oldest first."""

    def __init__(self, sessions: SessionServer, own: OwnState) -> None:
        self._sessions = sessions
        self._own = own
        self._round = AskingRound()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(asking_interval_s(1 + len(self._own.directory.others())))
            self.ask(time.monotonic())

    def ask(self, now_s: float) -> None:
        """Ask one session to move, where there are too many. What the others have is as old as
        their last heartbeat.
        """
        state = self._own.state()
        if state.draining:
            return
        serving = [one for one in self._own.directory.others() if not one.draining]
        others = [one.sessions for one in serving]
        neighbours = [one.sessions for one in serving if one.host_id == state.host_id]
        sessions = self._sessions.sessions
        session = session_to_ask(sessions, others, neighbours, now_s)
        if session is not None and self._round.allows(sessions, now_s):
            session.ask_to_move(now_s)
            self._round.asked(sessions, now_s)

    def __repr__(self) -> str:
        return f"<SessionSpreader of {self._sessions!r}>"
