"""Pacing and metering."""

from __future__ import annotations

import math

import pytest

from objectcache_storage_server.scheduling.lanes.pace_link import Pace, RateMeter, TenantPaces


def test_a_pace_sends_at_its_rate() -> None:
    pace = Pace(100.0, 0.5, 0.0)
    for piece in range(10):
        assert pace.next_at_s == pytest.approx(piece * 0.2)
        pace.charge(20, pace.next_at_s)


def test_who_was_late_catches_up_as_far_as_it_may() -> None:
    pace = Pace(100.0, 0.5, 0.0)
    pace.charge(10, 3.0)
    assert pace.next_at_s == pytest.approx(2.6)
    pace.charge(100, 3.0)
    assert pace.next_at_s == pytest.approx(3.6)


def test_an_infinite_pace_never_waits() -> None:
    pace = Pace(math.inf, 0.5, 0.0)
    for _ in range(3):
        pace.charge(10**12, 1.0)
        assert pace.next_at_s <= 1.0


def test_what_was_sent_too_early_is_owed_at_another_rate_too() -> None:
    pace = Pace(100.0, 0.5, 0.0)
    pace.charge(200, 0.0)
    pace.change(400.0, 1.0)  # 100 bytes are left
    assert pace.next_at_s == pytest.approx(1.25)
    pace.change(50.0, 1.0)
    assert pace.next_at_s == pytest.approx(3.0)


def test_a_change_of_rate_leaves_nothing_to_catch_up() -> None:
    pace = Pace(100.0, 10.0, 0.0)
    pace.change(200.0, 8.0)
    assert pace.next_at_s == 8.0


def test_a_turn_keeps_what_is_owed_and_what_was_missed_by_the_byte() -> None:
    pace = Pace(100.0, 0.5, 0.0)
    pace.charge(200, 0.0)
    pace.turn(400.0, 1.0)  # 100 bytes are owed
    assert pace.next_at_s == pytest.approx(1.25)
    pace.turn(200.0, 1.5)  # 100 bytes were missed
    assert pace.next_at_s == pytest.approx(1.0)
    pace.turn(400.0, 9.0)  # as many as may be caught up: 100
    assert pace.next_at_s == pytest.approx(8.75)


def test_a_pace_without_a_rate_owes_nothing_when_it_gets_one() -> None:
    pace = Pace(math.inf, 0.5, 0.0)
    pace.charge(10**9, 1.0)
    pace.change(1.0, 1.0)
    assert pace.next_at_s == 1.0
    pace.change(math.inf, 2.0)
    assert pace.next_at_s == 2.0


def test_a_tenant_whose_cap_stays_keeps_what_it_owes_and_may_catch_up() -> None:
    paces = TenantPaces(0.5)
    paces.change({"owing": 100.0, "late": 100.0}, 0.0)
    paces.charge("owing", 200, 0.0)
    paces.change({"owing": 100.0, "late": 100.0, "other": 1.0}, 1.0)
    assert paces.next_at_s("owing") == 2.0
    paces.charge("late", 10, 1.0)
    assert paces.next_at_s("late") == pytest.approx(0.6)
    assert paces.next_at_s("other") == 1.0


def test_a_tenant_whose_cap_changes_owes_the_same_bytes_and_without_one_nothing() -> None:
    paces = TenantPaces(0.5)
    paces.change({"a": 100.0, "b": 100.0}, 0.0)
    for tenant in "ab":
        paces.charge(tenant, 200, 0.0)
    paces.change({"a": 400.0}, 1.0)  # 100 bytes are left
    assert paces.next_at_s("a") == pytest.approx(1.25)
    assert paces.next_at_s("b") == -math.inf
    paces.charge("b", 10**9, 1.0)
    assert paces.next_at_s("b") == -math.inf


def test_the_meter_tells_the_last_second() -> None:
    meter = RateMeter()
    for step in range(40):
        meter.add(50, step * 0.05)
    assert meter.rate_bytes_per_s(2.0) == pytest.approx(1000)
    assert meter.rate_bytes_per_s(2.55) == pytest.approx(500)
    assert meter.rate_bytes_per_s(4.0) == 0


def test_the_peak_of_the_meter_fades() -> None:
    meter = RateMeter()
    assert meter.peak_bytes_per_s(0.0) == 0.0
    for step in range(30):
        meter.add(100, step * 0.1)
    peak = meter.peak_bytes_per_s(3.0)
    assert peak == pytest.approx(1000, rel=0.15)
    assert meter.peak_bytes_per_s(13.0) == pytest.approx(peak / 2)
