"""What is known of storage NICs, and when each may be sent something."""

from __future__ import annotations

import math

import pytest

from objectcache_storage_server.scheduling.lanes.nic_paces import (
    NIC_KEPT_S,
    NICS_MAX,
    Nic,
    NicPaces,
)

CATCH_UP_S = 0.002
MB = 1_000_000


def some_paces() -> NicPaces:
    return NicPaces(CATCH_UP_S)


def names(paces: NicPaces) -> list[str]:
    return [nic.destination[1] for nic in paces.known()]


def test_a_nic_is_sent_what_it_carries_and_one_of_no_rate_whatever_comes() -> None:
    paces = some_paces()
    slow = paces.enter(("t", "slow"), 5.0 * MB, 10.0, pooled=True)
    other = paces.enter(("t", "other"), None, 10.0, pooled=True)
    for nic in (slow, other):
        nic.charge(MB, 10.0, pooled=True)
    assert slow.next_at_s(pooled=True) == pytest.approx(10.2)
    assert other.next_at_s(pooled=True) <= 10.0
    assert other.rate == math.inf
    assert (slow.sent_bytes, other.sent_bytes) == (MB, MB)


def test_a_name_is_its_tenants_own() -> None:
    paces = some_paces()
    mine = paces.enter(("a", "nic"), 5.0 * MB, 0.0, pooled=True)
    theirs = paces.enter(("b", "nic"), 100.0 * MB, 0.0, pooled=True)
    assert mine is not theirs
    assert (mine.rate, theirs.rate) == (5.0 * MB, 100.0 * MB)
    assert paces.enter(("a", "nic"), None, 0.0, pooled=True) is mine


def test_the_newest_rate_holds_and_who_says_none_changes_nothing() -> None:
    paces = some_paces()
    nic = paces.enter(("t", "nic"), 5.0 * MB, 0.0, pooled=True)
    paces.enter(("t", "nic"), None, 0.0, pooled=True)
    assert nic.rate == 5.0 * MB
    nic.charge(MB, 0.0, pooled=True)
    paces.enter(("t", "nic"), 10.0 * MB, 0.0, pooled=True)
    assert nic.rate == 10.0 * MB
    assert nic.next_at_s(pooled=True) == pytest.approx(0.1)  # what was sent is owed at the new rate


def test_the_pool_and_fair_turns_divide_a_nic_by_their_deliveries() -> None:
    paces = some_paces()
    nic = paces.enter(("t", "nic"), 12.0 * MB, 0.0, pooled=True)
    paces.enter(("t", "nic"), None, 0.0, pooled=True)
    paces.enter(("t", "nic"), None, 0.0, pooled=False)
    assert nic.pool_bytes_per_s == 8.0 * MB
    nic.charge(MB, 0.0, pooled=True)
    nic.charge(MB, 0.0, pooled=False)
    assert nic.next_at_s(pooled=True) == pytest.approx(1 / 8)
    assert nic.next_at_s(pooled=False) == pytest.approx(1 / 4)
    paces.leave(nic, 0.0, pooled=False)
    assert nic.pool_bytes_per_s == 12.0 * MB
    assert nic.next_at_s(pooled=True) == pytest.approx(1 / 12)


def _come_and_go(paces: NicPaces, name: str, now_s: float) -> Nic:
    nic = paces.enter(("t", name), 5.0 * MB, now_s, pooled=True)
    paces.leave(nic, now_s, pooled=True)
    return nic


def test_idle_nics_are_forgotten_after_a_while_and_busy_ones_never() -> None:
    paces = some_paces()
    paces.enter(("t", "busy"), 5.0 * MB, 0.0, pooled=True)
    _come_and_go(paces, "idle", 0.0)
    _come_and_go(paces, "later", NIC_KEPT_S - 1)
    assert names(paces) == ["busy", "idle", "later"]
    _come_and_go(paces, "last", NIC_KEPT_S)
    assert names(paces) == ["busy", "later", "last"]


def test_names_without_deliveries_are_bounded() -> None:
    paces = some_paces()
    paces.enter(("t", "busy"), 5.0 * MB, 0.0, pooled=True)
    for number in range(NICS_MAX + 50):
        _come_and_go(paces, f"nic-{number}", 0.0)
    assert len(names(paces)) <= NICS_MAX + 2
    assert names(paces)[0] == "busy"
    assert names(paces)[-1] == f"nic-{NICS_MAX + 49}"
