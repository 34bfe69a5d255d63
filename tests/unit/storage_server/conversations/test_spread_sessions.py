"""Which session a server asks to move, and when it asks none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from objectcache_storage_server.conversations.spread_sessions import (
    ASKED_AGAIN_S,
    IN_VAIN_MAX,
    MOVING_S,
    AskingRound,
    asking_interval_s,
    session_to_ask,
    surplus,
)

NEVER = float("-inf")


@dataclass(eq=False)
class Held:
    """A session."""

    name: str
    asked_to_move_s: float = NEVER
    is_local: bool = False
    is_idle: bool = True


def asked(
    sessions: Sequence[Held], others: Sequence[int], now_s: float = 0.0, same_host: bool = False
) -> str:
    chosen = session_to_ask(sessions, others, others if same_host else [], now_s)
    return chosen.name if chosen is not None else ""


@pytest.mark.parametrize(
    ("own", "others", "moves"),
    [
        (9, (), 0),  # alone
        (10, (9, 9), 0),  # nobody has few
        (63, (*[62] * 14, 0), 4),  # one was added to fifteen
        (58, (*[62] * 14, 0), 0),  # the others have more than their part, not this one
        (2, (0,), 1),
        (1, (0,), 0),
    ],
)
def test_a_server_has_too_many_where_another_has_few(
    own: int, others: tuple[int, ...], moves: int
) -> None:
    assert surplus(own, others) == moves


def test_the_oldest_idle_one_is_asked_once() -> None:
    sessions = [Held("busy", is_idle=False), Held("old"), Held("young"), Held("youngest")]
    assert asked(sessions, [0]) == "old"
    sessions[1].asked_to_move_s = 0.0
    assert asked(sessions, [0], 1.0) == "young"
    sessions[2].asked_to_move_s = 1.0
    assert asked(sessions, [1], 2.0) == ""  # two of four go, and one has come
    assert asked(sessions, [1], 2.0 + MOVING_S) == "youngest"  # those that were asked have stayed
    sessions[3].is_idle = False
    assert asked(sessions, [1], 2.0 + MOVING_S) == ""
    assert asked(sessions, [0], 1.0 + ASKED_AGAIN_S) == "old"


def test_what_joined_on_a_hosts_own_socket_goes_to_servers_of_that_host_alone() -> None:
    sessions = [Held("local", is_local=True), Held("remote"), Held("other")]
    assert asked(sessions, [0]) == "remote"
    assert asked(sessions, [0], same_host=True) == "local"


def test_the_pace_is_that_of_all_servers_together() -> None:
    assert asking_interval_s(2) == 1.0
    assert asking_interval_s(100) == 10.0


def moves_in(open_count: int, until_s: int, *, come_back: bool) -> int:
    """How many of these sessions are asked, each of which goes at once."""
    sessions, asking, moves = [Held(str(one)) for one in range(open_count)], AskingRound(), 0
    for now_s in range(until_s):
        chosen = session_to_ask(sessions, [open_count - len(sessions)], [], now_s)
        if chosen is not None and asking.allows(sessions, now_s):
            chosen.asked_to_move_s = now_s
            asking.asked(sessions, now_s)
            sessions.remove(chosen)
            sessions += [Held("again")] * come_back
            moves += 1
    return moves


def test_sessions_that_come_back_are_asked_no_more_for_a_while() -> None:
    assert moves_in(20, int(ASKED_AGAIN_S), come_back=True) == IN_VAIN_MAX
    assert moves_in(20, int(2 * ASKED_AGAIN_S), come_back=True) == 2 * IN_VAIN_MAX
    assert moves_in(20, int(ASKED_AGAIN_S), come_back=False) > IN_VAIN_MAX


def test_sessions_that_stay_where_they_are_asked_hold_up_no_others() -> None:
    sessions, asking = [Held(str(one)) for one in range(20)], AskingRound()
    for now_s in range(2 * IN_VAIN_MAX):
        assert asking.allows(sessions, now_s)
        sessions[now_s].asked_to_move_s = now_s
        asking.asked(sessions, now_s)
