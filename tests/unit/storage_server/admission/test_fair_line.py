"""Who is next: the tenant that holds the least; what fits passes what does not, so often."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.errors import Busy
from objectcache_storage_server.admission.fair_line import (
    PASSED_MAX,
    TRIED_MAX,
    Counted,
    FairLine,
    Turn,
)

TENANTS = "abcd"


def nothing() -> None:
    """Nobody is told of the turn."""


def a_line(total: int, waiting_max: int = 10) -> tuple[Counted, FairLine[int]]:
    places = Counted("places", "places_max", total)
    return places, FairLine(places, waiting_max)


def test_the_tenant_that_holds_the_least_is_next_and_equals_in_their_order() -> None:
    _, line = a_line(8)
    told: list[str] = []
    for _ in range(6):
        assert line.ask("a", 1, nothing).taken == 1
    for tenant in "bc":
        assert line.ask(tenant, 1, nothing).taken == 1
    for tenant in "acbd":
        line.ask(tenant, 1, partial(told.append, tenant))
    assert (line.waiting, told) == (4, [])
    line.give_back("a", 2)
    assert told == ["d"]
    line.give_back("a", 2)
    assert told == ["d", "c", "b"]


def test_a_large_wish_is_passed_so_often_and_then_has_its_turn() -> None:
    _, line = a_line(8)
    line.ask("other", 5, nothing)
    large = line.ask("a", 4, nothing)
    for number in range(PASSED_MAX):
        assert line.ask(f"small-{number}", 1, nothing).taken == 1
        line.give_back(f"small-{number}", 1)
    small = line.ask("b", 1, nothing)
    assert (large.taken, small.taken) == (None, None)
    line.give_back("other", 5)
    assert (large.taken, small.taken) == (4, 1)


def test_what_waits_and_fits_passes_what_does_not_when_something_comes_back() -> None:
    _, line = a_line(8)
    line.ask("a", 6, nothing)
    line.ask("b", 1, nothing)
    line.ask("c", 1, nothing)
    large, small = line.ask("d", 7, nothing), line.ask("e", 1, nothing)
    assert (large.taken, small.taken) == (None, None)
    line.give_back("c", 1)
    assert (large.taken, small.taken) == (None, 1)


class Puts(Counted):
    """Wishes for one pass freely."""

    def passes_freely(self, tenant: str, wish: int) -> bool:
        return wish == 1


def test_wishes_too_small_to_hold_it_up_pass_a_large_one_for_ever() -> None:
    places = Puts("places", "places_max", 100)
    line: FairLine[int] = FairLine(places, 10)
    line.ask("holder", 50, nothing)
    large = line.ask("asker", 90, nothing)
    for number in range(2 * PASSED_MAX):
        assert line.ask(f"t{number}", 1, nothing).taken == 1
        line.give_back(f"t{number}", 1)
    assert large.passed == 0


class CountedLooks(Counted):
    """Counts how often the line looks at what a tenant holds."""

    looks = 0

    def held(self, tenant: str) -> float:
        self.looks += 1
        return super().held(tenant)


def test_who_is_next_is_found_once_until_the_line_changes() -> None:
    places = CountedLooks("places", "places_max", 100)
    line: FairLine[int] = FairLine(places, 10)
    line.ask("holder", 70, nothing)
    line.ask("holder", 90, nothing)
    for number in range(50):
        line.ask(f"w{number}", 99, nothing)
    assert line.first is not None
    places.looks = 0
    for number in range(100):
        line.is_wanted_more(f"other-{number}")
        line.is_held_from_others(f"other-{number}")
    assert places.looks <= 400


class CountedTries(Counted):
    """Counts how often something is asked for."""

    tries = 0

    def take(self, tenant: str, wish: int) -> int | None:
        self.tries += 1
        return super().take(tenant, wish)


def test_a_step_tries_no_more_turns_however_many_wait_for_more_than_there_is() -> None:
    places = CountedTries("places", "places_max", 1000)
    line: FairLine[int] = FairLine(places, 10)
    line.ask("holder", 600, nothing)
    for number in range(5 * TRIED_MAX):
        line.ask(f"w{number}", 700, nothing)
    places.tries = 0
    line.advance()
    assert places.tries == TRIED_MAX


def test_what_passes_freely_does_so_behind_any_number_of_large_wishes() -> None:
    line: FairLine[int] = FairLine(Puts("places", "places_max", 100), 10)
    for number in range(100):
        assert line.ask(f"holder-{number}", 1, nothing).taken == 1
    for number in range(5 * TRIED_MAX):
        line.ask(f"w{number}", 70, nothing)
    small = line.ask("small", 1, nothing)
    assert small.taken is None
    line.give_back("holder-1", 1)
    assert small.taken == 1


class Telling(Counted):
    """Lets those who wait know when something came back, as a pool of memory does."""

    line: FairLine[int]

    def give_back(self, tenant: str, taken: int) -> None:
        super().give_back(tenant, taken)
        self.line.advance()


def test_whoever_gives_back_is_ranked_by_what_it_has_left() -> None:
    places = Telling("places", "places_max", 8)
    places.line = line = FairLine(places, 10)
    told: list[str] = []
    for tenant in "aaaaabbc":
        assert line.ask(tenant, 1, nothing).taken == 1
    for tenant in "ba":
        line.ask(tenant, 1, partial(told.append, tenant))
    line.give_back("a", 4)
    assert told == ["a", "b"]


def test_a_tenant_holds_up_those_who_hold_less_and_itself() -> None:
    _, line = a_line(16)
    for tenant, wish in (("a", 5), ("b", 5), ("c", 2)):
        assert line.ask(tenant, wish, nothing).taken
    assert not line.is_held_from_others("a")
    line.ask("b", 5, nothing)
    assert line.is_held_from_others("b")  # its own request waits
    assert not line.is_held_from_others("a")  # it holds no more than "b"
    line.ask("c", 5, nothing)
    assert line.is_held_from_others("a")
    assert line.is_held_from_others("c")


def test_whoever_holds_less_than_all_that_wait_overtakes_them() -> None:
    _, line = a_line(16)
    line.ask("greedy", 12, nothing)
    waiting = line.ask("greedy", 1, nothing)
    assert waiting.taken is None
    assert line.ask("new", 1, nothing).taken == 1
    assert line.is_wanted_more("greedy") is False  # it is its own that wait
    assert line.first is waiting


def test_many_requests_of_one_tenant_do_not_stand_before_the_first_of_another() -> None:
    _, line = a_line(1)
    told: list[str] = []
    line.ask("a", 1, nothing)
    for tenant in "aaaab":
        line.ask(tenant, 1, partial(told.append, tenant))
    for tenant in "ab":
        line.give_back(tenant, 1)
    assert told == ["b", "a"]


def test_a_queue_is_its_tenants_own() -> None:
    _, line = a_line(1, waiting_max=2)
    line.ask("a", 1, nothing)
    for tenant in "aabb":
        line.ask(tenant, 1, nothing)
    said = r"1 places are taken, 1 of them by 'a'; places_max is 1, and 2 requests of this tenant"
    with pytest.raises(Busy, match=rf"{said} wait for places \(scheduler\.queue_max is 2\)"):
        line.ask("a", 1, nothing)
    assert line.ask("c", 1, nothing).taken is None
    assert line.waiting == 5


class Line(RuleBasedStateMachine):
    """Any order of wishes, ends and retreats."""

    @initialize(total=st.integers(1, 40))
    def begin(self, total: int) -> None:
        self.total = total
        self.places, self.line = a_line(total, 1000)
        self.model = FairShares(total)
        self.waiting: list[Turn[int]] = []
        self.taken: list[Turn[int]] = []

    def settle(self) -> None:
        """Those that were granted wait no more."""
        for turn in [one for one in self.waiting if one.taken is not None]:
            self.waiting.remove(turn)
            self.taken.append(turn)

    @rule(tenant=st.sampled_from(TENANTS), amount=st.integers(1, 5))
    def ask(self, tenant: str, amount: int) -> None:
        amount = min(amount, self.total)
        least = min((self.places.held(one.tenant) for one in self.waiting), default=None)
        held = self.places.held(tenant)
        first = self.line.first
        passed = 0 if first is None else first.passed
        turn = self.line.ask(tenant, amount, nothing)
        if turn.taken is None:
            self.waiting.append(turn)
            return
        assert first is None or least is None or held <= least or first.passed == passed + 1
        self.taken.append(turn)

    @rule(place=st.integers(0, 30))
    def end(self, place: int) -> None:
        if self.taken:
            turn = self.taken.pop(place % len(self.taken))
            self.line.give_back(turn.tenant, turn.taken or 0)
            self.settle()

    @rule(place=st.integers(0, 30))
    def leave(self, place: int) -> None:
        if self.waiting:
            assert self.line.leave(self.waiting.pop(place % len(self.waiting))) == 0
            self.line.advance()
            self.settle()

    @rule()
    def all_that_wait_have_their_turn_in_the_end(self) -> None:
        while self.waiting:
            assert self.taken, "nobody holds anything, and somebody waits"
            self.end(0)

    @invariant()
    def nothing_is_lost_and_nobody_who_holds_nothing_waits_for_what_is_free(self) -> None:
        if not hasattr(self, "line"):
            return
        assert self.places.taken == sum(turn.taken or 0 for turn in self.taken) <= self.total
        assert self.line.waiting == len(self.waiting)
        unreserved = self.total - self.places.taken - self.total // 8
        first = self.line.first
        assert (first is None) == (not self.waiting)
        assert first is None or self.places.held(first.tenant) or first.wish > unreserved


TestLine = Line.TestCase
