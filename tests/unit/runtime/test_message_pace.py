"""How many messages of a session are read, over virtual time."""

from __future__ import annotations

import pytest

from objectcache_runtime.shares.message_pace import BURST_S, PAUSE_S, MessagePace


def read_for(pace: MessagePace, start_s: float, end_s: float) -> int:
    """Messages that a reader with no other work takes of a flood."""
    now_s, count = start_s, 0
    while now_s < end_s:
        count += 1
        now_s += pace.count(now_s) + 1e-6
    return count


@pytest.mark.parametrize("rate_per_s", [2000.0, 7.0, 1.0])
def test_a_flood_is_read_at_the_rate_after_its_burst(rate_per_s: float) -> None:
    pace = MessagePace(rate_per_s, 100.0)
    count = read_for(pace, 100.0, 160.0)
    assert count == pytest.approx(rate_per_s * (60 + BURST_S), rel=0.02, abs=1)


def test_below_the_rate_nobody_waits_and_the_burst_comes_back() -> None:
    pace = MessagePace(10.0, 0.0)
    assert [pace.count(index * 0.1) for index in range(1000)] == [0.0] * 1000
    assert [pace.count(200.0) for _ in range(19)] == [0.0] * 19
    assert pace.count(200.0) == pytest.approx(0.1)


def test_a_session_over_its_rate_is_seldom_woken() -> None:
    pace = MessagePace(1e6, 0.0)
    pauses_s = [pace.count(0.0) for _ in range(2_000_001)]
    assert set(pauses_s[:1_999_999]) == {0.0}
    assert pauses_s[-2:] == [PAUSE_S, PAUSE_S]


def test_a_clock_that_steps_back_gives_nothing() -> None:
    pace = MessagePace(1.0, 50.0)
    assert [pace.count(now_s) for now_s in (50.0, 40.0, 50.0)] == [0.0, 1.0, 2.0]


def test_it_tells_what_is_left() -> None:
    assert repr(MessagePace(2000, 0.0)) == "<MessagePace 4000/4000, 2000 a second>"
