"""Who may take how much: something is left for whoever comes next, and idle is lent out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from objectcache_runtime.shares.fair_shares import LENT_PER_FREE, RESERVED_PART, FairShares

TENANTS = "abcdefgh"


def filled(shares: FairShares, tenants: str) -> None:
    """All take one by turns for as long as they may."""
    while True:
        taking = [tenant for tenant in tenants if shares.may_take(tenant, 1)]
        if not taking:
            return
        for tenant in taking:
            if shares.may_take(tenant, 1):
                shares.take(tenant, 1)


@pytest.mark.parametrize("total", [4, 16, 64, 128, 256, 1000])
def test_a_tenant_alone_is_lent_three_quarters(total: int) -> None:
    shares = FairShares(total)
    filled(shares, "a")
    assert shares.held("a") == total * 3 // 4


@pytest.mark.parametrize("total", [64, 128, 256])
@pytest.mark.parametrize("count", range(1, 9))
def test_tenants_that_take_all_they_can_hold_alike_and_the_next_has_its_units(
    total: int, count: int
) -> None:
    shares = FairShares(total)
    filled(shares, TENANTS[:count])
    held = [shares.held(tenant) for tenant in TENANTS[:count]]
    assert max(held) - min(held) <= 1
    assert shares.taken >= total * 3 // 4
    assert shares.room("next") >= max(1, total // 64)


@pytest.mark.parametrize("total", range(1, 10))
def test_a_small_whole_goes_to_whoever_holds_nothing_to_the_last(total: int) -> None:
    shares = FairShares(total)
    for number in range(total):
        assert shares.may_take(str(number), 1)
        shares.take(str(number), 1)
    assert not shares.may_take("late", 1)


def test_a_first_grant_is_large_where_it_leaves_the_reserve_and_a_second_is_not() -> None:
    shares = FairShares(1000)
    assert shares.may_take("a", 1000)  # nobody holds anything
    shares.take("a", 700)
    assert not shares.may_take("a", 60)
    assert not shares.may_take("b", 176)
    assert shares.may_take("b", 175)
    shares.take("b", 175)
    assert not shares.may_take("b", 1)
    assert not shares.may_take("c", 16)  # more than an eighth of what is free
    shares.give_back("a", 700)
    assert shares.may_take("b", 400)


def test_half_of_the_reserve_is_for_units_alone() -> None:
    shares = FairShares(16_000, unit=10)
    shares.take("greedy", 14_000)
    for number in range(60):
        tenant = f"t{number}"
        shares.take(tenant, max(n for n in (250, 100, 50, 20, 10) if shares.may_take(tenant, n)))
    assert shares.free < 1000
    assert shares.may_take("next", 10)


def test_a_weight_multiplies_what_may_be_held() -> None:
    shares = FairShares(1000)
    shares.take("a", 600)
    assert not shares.may_take("a", 200)
    assert shares.may_take("a", 200, weight=3.0)


@given(st.integers(1, 500), st.permutations(range(20)), st.data())
def test_what_is_given_back_in_whatever_order_leaves_nothing(
    total: int, order: list[int], data: st.DataObject
) -> None:
    shares = FairShares(total)
    grants: list[tuple[str, int]] = []
    for _ in order:
        tenant = data.draw(st.sampled_from(TENANTS))
        amount = min(shares.room(tenant), data.draw(st.integers(0, total)))
        shares.take(tenant, amount)
        grants.append((tenant, amount))
    for number in order:
        shares.give_back(*grants[number])
    assert (shares.taken, shares.tenants, shares.free) == (0, 0, total)


class Sharing(RuleBasedStateMachine):
    """Any tenants that take what they may, and give back."""

    @initialize(total=st.integers(1, 300))
    def begin(self, total: int) -> None:
        self.shares = FairShares(total)

    @rule(tenant=st.sampled_from(TENANTS), amount=st.integers(1, 100))
    def take(self, tenant: str, amount: int) -> None:
        shares = self.shares
        held, free = shares.held(tenant), shares.free
        if not shares.may_take(tenant, amount):
            return
        shares.take(tenant, amount)
        reserve = shares.total // RESERVED_PART
        is_first = held == 0 and (
            free == shares.total
            or free - amount >= reserve
            or (amount <= free // RESERVED_PART and free - amount >= reserve // 2)
        )
        is_little = shares.held(tenant) <= max(1, shares.total // 64)
        is_lent = shares.held(tenant) <= LENT_PER_FREE * (free - amount)
        leaves_the_reserve = free - amount >= reserve
        assert is_first or is_little or (is_lent and leaves_the_reserve)

    @rule(tenant=st.sampled_from(TENANTS), part=st.floats(0, 1))
    def give_back(self, tenant: str, part: float) -> None:
        self.shares.give_back(tenant, int(self.shares.held(tenant) * part))

    @invariant()
    def no_more_is_held_than_there_is(self) -> None:
        if hasattr(self, "shares"):
            assert sum(map(self.shares.held, TENANTS)) == self.shares.taken <= self.shares.total

    @invariant()
    def who_holds_nothing_has_a_unit_of_what_is_free(self) -> None:
        if hasattr(self, "shares"):
            unit = max(1, self.shares.total // 64)
            assert self.shares.room("newcomer") >= min(unit, self.shares.free)


TestSharing = Sharing.TestCase
