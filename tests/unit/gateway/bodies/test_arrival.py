"""Which bodies arrive too slowly."""

from __future__ import annotations

import pytest

from objectcache_gateway.bodies.arrival import ArrivalBudget


def test_a_body_at_the_rate_may_take_for_ever() -> None:
    budget = ArrivalBudget(60.0, 1024)
    for _ in range(10_000):
        budget.arrived(1024, 1.0)
    assert budget.left_s == 60.0


def test_a_slower_one_uses_its_budget_up_however_it_spreads_its_bytes() -> None:
    one_by_one, at_once = ArrivalBudget(60.0, 1024), ArrivalBudget(60.0, 1024)
    for _ in range(64):
        one_by_one.arrived(8, 0.5)  # 16 bytes a second
    at_once.arrived(8 * 64, 32.0)
    assert one_by_one.left_s == pytest.approx(at_once.left_s) == pytest.approx(60 - 32 + 0.5)


def test_a_byte_before_each_silence_ends_does_not_go_on_for_ever() -> None:
    budget = ArrivalBudget(60.0, 1024)
    budget.arrived(1, 59.0)
    assert 1.0 < budget.left_s < 1.01


def test_what_was_sent_fast_earns_no_more_than_one_silence() -> None:
    budget = ArrivalBudget(60.0, 1024)
    budget.arrived(1 << 30, 1.0)
    assert budget.left_s == 60.0
    assert repr(budget) == "<ArrivalBudget 60.0 of 60 s left>"


def test_without_a_rate_every_byte_earns_all_of_it() -> None:
    budget = ArrivalBudget(60.0, 0)
    for _ in range(100):
        budget.arrived(1, 59.0)
    assert budget.left_s == 60.0
    budget.arrived(0, 59.0)
    assert budget.left_s == 1.0
