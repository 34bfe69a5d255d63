"""The rate of what comes counts the time in which something was awaited, and forgets."""

from __future__ import annotations

import pytest

from objectcache.routes.received_rate import IDLE_S_MAX, RATE_MEMORY_S, ReceivedRate


def test_time_in_which_nothing_was_awaited_does_not_count() -> None:
    rate = ReceivedRate(0.0)
    assert rate.rate_bytes_per_s(0.0) == 0
    rate.note(100.0, 0, awaits=True)
    rate.note(101.0, 500, awaits=False)
    rate.note(105.0, 0, awaits=True)
    rate.note(105.5, 250, awaits=False)
    assert rate.rate_bytes_per_s(106.0) == pytest.approx(500)


def test_bytes_after_a_while_say_more_than_all_before_it() -> None:
    rate = ReceivedRate(0.0)
    rate.note(0.0, 0, awaits=True)
    rate.note(0.01, 1000, awaits=False)
    rate.note(9.01, 0, awaits=True)
    assert rate.rate_bytes_per_s(9.01) == pytest.approx(100_000)  # nothing else is known
    rate.note(10.01, 30, awaits=False)
    assert 30 <= rate.rate_bytes_per_s(10.01) < 80


def test_what_was_long_ago_counts_less() -> None:
    rate = ReceivedRate(0.0)
    rate.note(0.0, 0, awaits=True)
    rate.note(1.0, 1000, awaits=True)
    end_s = 2 + 6 * int(RATE_MEMORY_S)
    for second in range(2, end_s):
        rate.note(float(second), 100, awaits=True)
    assert 100 <= rate.rate_bytes_per_s(end_s - 1.0) < 110


def test_what_was_slow_once_is_unknown_after_it_was_idle() -> None:
    rate = ReceivedRate(0.0)
    rate.note(0.0, 0, awaits=True)
    rate.note(10.0, 10, awaits=False)
    assert rate.rate_bytes_per_s(10.0 + IDLE_S_MAX) == pytest.approx(1)
    assert rate.rate_bytes_per_s(10.1 + IDLE_S_MAX) == 0
    rate.note(50.0, 0, awaits=True)
    rate.note(51.0, 500, awaits=False)
    assert rate.rate_bytes_per_s(51.0) == pytest.approx(500)
