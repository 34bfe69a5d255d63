"""Landing memory is granted in turn, to one asker in its own order, within what there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_relay.landing.landing_grants import LandingGrant, LandingGrants, LandingState
from objectcache_schemas.errors import InvalidRequest


def unasked() -> None:
    pytest.fail("a grant that was there at once is not told of")


def test_small_deliveries_do_not_overtake_a_large_one_that_waits() -> None:
    told: list[str] = []
    grants = LandingGrants(10)
    first = grants.ask(6, unasked)
    large = grants.ask(8, lambda: told.append("large"))
    small = grants.ask(2, lambda: told.append("small"))
    assert (large.state, small.state) == (LandingState.WAITING, LandingState.WAITING)
    assert grants.waiting_bytes == 10
    grants.end(first)
    assert told == ["large", "small"]
    assert grants.free_bytes == 0


def test_who_stops_waiting_lets_those_behind_it_on() -> None:
    told: list[str] = []
    grants = LandingGrants(10)
    grants.ask(6, unasked)
    large = grants.ask(8, unasked)
    grants.ask(2, lambda: told.append("small"))
    grants.end(large)
    assert told == ["small"]
    assert grants.waiting_bytes == 0


def test_no_more_deliveries_have_memory_than_may() -> None:
    told: list[str] = []
    grants = LandingGrants(10, deliveries_max=1)
    first = grants.ask(1, unasked)
    grants.ask(1, lambda: told.append("second"))
    assert grants.free_bytes == 9
    assert told == []
    grants.end(first)
    assert told == ["second"]


def test_memory_that_was_given_back_is_not_given_back_again() -> None:
    grants = LandingGrants(10)
    grant = grants.ask(6, unasked)
    grants.end(grant)
    grants.end(grant)
    assert (grants.free_bytes, grants.granted_bytes) == (10, 0)


def test_more_than_there_is_is_refused_with_the_setting() -> None:
    with pytest.raises(InvalidRequest, match=r"relay\.landing_bytes is 10"):
        LandingGrants(10).ask(11, unasked)


def test_held_memory_is_free_and_goes_to_whoever_asks_the_oldest_first() -> None:
    taken: list[str] = []
    grants = LandingGrants(10)
    for name in ("older", "newer"):
        grants.hold(grants.ask(4, unasked), lambda name=name: taken.append(name))  # type: ignore[misc]
    assert (grants.free_bytes, grants.held_bytes) == (10, 8)
    assert grants.ask(3, unasked).state is LandingState.GRANTED
    assert taken == ["older"]
    assert (grants.free_bytes, grants.held_bytes) == (7, 4)


def test_memory_that_is_held_while_others_wait_is_theirs_at_once() -> None:
    told: list[str] = []
    grants = LandingGrants(10)
    grant = grants.ask(6, unasked)
    grants.ask(8, lambda: told.append("granted"))
    grants.hold(grant, lambda: told.append("taken"))
    assert told == ["taken", "granted"]
    grants.end(grant)
    assert grants.granted_bytes == 8


def test_held_memory_that_is_used_again_is_nobody_elses() -> None:
    grants = LandingGrants(10, deliveries_max=1)
    grant = grants.ask(6, unasked)
    grants.hold(grant, lambda: pytest.fail("nobody needs it"))
    grants.use_again(grant)
    assert grants.ask(1, unasked).state is LandingState.WAITING
    assert (grants.granted_bytes, grants.held_bytes) == (6, 0)


def test_askers_have_turns_and_each_its_own_order() -> None:
    told: list[str] = []
    grants = LandingGrants(10)
    first = grants.ask(10, unasked, "many")
    waiting: dict[str, LandingGrant] = {}
    for name in ("many 1", "many 2", "many 3", "one 1"):
        waiting[name] = grants.ask(10, lambda name=name: told.append(name), name.split()[0])  # type: ignore[misc]
    grants.end(first)
    for _ in range(3):
        grants.end(waiting[told[-1]])
    assert told == ["many 1", "one 1", "many 2", "many 3"]


def test_what_comes_at_a_rate_has_half_and_others_pass_it() -> None:
    told: list[str] = []
    grants = LandingGrants(10)
    slow = grants.ask(4, unasked, "slow", is_rated=True)
    more = grants.ask(4, lambda: told.append("slow"), "slow", is_rated=True)
    assert more.state is LandingState.WAITING
    assert grants.ask(6, unasked, "fast").state is LandingState.GRANTED
    grants.ask(6, lambda: told.append("fast"), "fast")
    grants.end(slow)
    assert told == ["slow"]


def test_one_that_comes_at_a_rate_may_have_more_than_half_alone() -> None:
    grants = LandingGrants(10)
    slow = grants.ask(8, unasked, is_rated=True)
    assert grants.ask(1, lambda: None, is_rated=True).state is LandingState.WAITING
    grants.hold(slow, unasked)
    assert (grants.granted_bytes, grants.held_bytes) == (1, 8)


def test_rings_leave_a_quarter_and_whoever_fits_there_passes_those_that_wait() -> None:
    told: list[str] = []
    grants = LandingGrants(16)
    first = grants.ask(6, unasked, "one", is_ring=True)
    grants.ask(6, unasked, "other", is_ring=True)
    grants.ask(4, lambda: told.append("ring"), "third", is_ring=True)
    grants.ask(4, lambda: told.append("rated"), "third", is_rated=True)
    small = grants.ask(4, unasked, "third")
    assert grants.free_bytes == 0
    grants.end(small)
    assert told == []
    grants.end(first)
    assert told == ["ring"]


def test_a_ring_waits_for_none_that_comes_at_a_rate_and_may_have_all_alone() -> None:
    grants = LandingGrants(16)
    rated = grants.ask(8, unasked, is_rated=True, is_ring=True)
    ring = grants.ask(8, unasked, is_ring=True)
    assert ring.state is LandingState.GRANTED
    grants.end(rated)
    grants.end(ring)
    assert grants.ask(16, unasked, is_ring=True).state is LandingState.GRANTED


EVENTS = st.sampled_from(["ask", "hold", "use again", "end"])


@given(st.lists(st.tuples(EVENTS, st.integers(1, 10)), max_size=60))
def test_grants_are_given_in_order_within_the_bound(events: list[tuple[str, int]]) -> None:
    grants = LandingGrants(10, deliveries_max=4)
    asked: list[LandingGrant] = []
    for event, number in events:
        of_state = {state: [one for one in asked if one.state is state] for state in LandingState}
        granted, held = of_state[LandingState.GRANTED], of_state[LandingState.HELD]
        if event == "ask":
            asked.append(grants.ask(number, lambda: None))
        elif event == "hold" and granted:
            grants.hold(granted[number % len(granted)], lambda: None)
        elif event == "use again" and held:
            grants.use_again(held[number % len(held)])
        elif event == "end" and asked:
            grants.end(asked.pop(number % len(asked)))
        asked = [one for one in asked if one.state is not LandingState.OVER]
        waiting = [grant for grant in asked if grant.state is LandingState.WAITING]
        assert asked[len(asked) - len(waiting) :] == waiting
        sums = {
            state: sum(one.length_bytes for one in asked if one.state is state)
            for state in LandingState
        }
        assert sums[LandingState.GRANTED] == grants.granted_bytes
        assert sums[LandingState.HELD] == grants.held_bytes
        assert grants.granted_bytes + grants.held_bytes <= 10
        assert len(asked) - len(waiting) <= 4
        assert sums[LandingState.WAITING] == grants.waiting_bytes
        if waiting:
            in_use = [one for one in asked if one.state is LandingState.GRANTED]
            assert waiting[0].length_bytes > grants.free_bytes or len(in_use) == 4
