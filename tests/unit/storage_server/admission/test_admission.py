"""Who begins, who waits and who is refused, against a plain model of the same."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.errors import Busy
from objectcache_schemas.operators.schedule import TenantShare
from objectcache_storage_server.admission.delivery_turns import (
    DURATION_UNKNOWN_S,
    IDLE_TENANTS_MAX,
    Admission,
    AdmissionLimits,
    Waiting,
)
from objectcache_storage_server.admission.holders import get_holder

TENANTS = ("a", "b", "c", "d")
WEIGHTS = (0.5, 1.0, 2.0, 3.0)


def limits(
    deliveries_max: int = 4,
    tenant_deliveries_max: int = 2,
    queue_max: int = 3,
    queue_timeout_s: float = 10.0,
) -> AdmissionLimits:
    return AdmissionLimits(deliveries_max, tenant_deliveries_max, queue_max, queue_timeout_s)


def wait(admission: Admission, tenant: str, now_s: float = 0.0) -> Waiting:
    """Enter where one has to wait."""
    token = admission.enter(tenant, now_s)
    assert token is not None
    return token


def begin(admission: Admission, tenant: str, count: int = 1) -> None:
    """Enter where there is room."""
    for _ in range(count):
        assert admission.enter(tenant, 0.0) is None


# --- the bounds ---


def test_a_tenant_at_scheduler_tenant_deliveries_max_waits_while_others_begin() -> None:
    admission = Admission(limits(deliveries_max=8, tenant_deliveries_max=2))
    begin(admission, "a", 2)
    wait(admission, "a")
    begin(admission, "b", 2)


def test_a_tenants_small_gets_begin_beside_all_others_that_it_may_have() -> None:
    shares = {"a": TenantShare(deliveries_max=2)}
    admission = Admission(limits(deliveries_max=64, tenant_deliveries_max=64), shares)
    begin(admission, "a", 2)
    wait(admission, "a")
    small_gets = get_holder("a", is_small=True)
    begin(admission, small_gets, 2)
    wait(admission, small_gets)


def test_all_tenants_together_stay_below_deliveries_max() -> None:
    admission = Admission(limits(deliveries_max=3))
    for tenant in "abc":
        begin(admission, tenant)
    token = wait(admission, "d")
    assert admission.leave("a", 1.0) == [token]
    assert admission.running == 3


def test_a_tenant_that_takes_all_it_can_leaves_places_to_whoever_comes_next() -> None:
    admission = Admission(limits(deliveries_max=64, tenant_deliveries_max=64, queue_max=64))
    begin(admission, "greedy", 48)
    wait(admission, "greedy")
    for index in range(16):
        begin(admission, str(index))
    assert admission.running == 64
    waiting = wait(admission, "late")
    assert admission.leave("greedy", 1.0) == [waiting]


def test_a_tenants_own_bound_goes_before_that_of_everybody() -> None:
    shares = {"a": TenantShare(deliveries_max=3), "b": TenantShare(deliveries_max=1)}
    admission = Admission(limits(deliveries_max=9), shares)
    begin(admission, "a", 3)
    begin(admission, "b", 1)
    begin(admission, "c", 2)
    for tenant in ("a", "b", "c"):
        wait(admission, tenant)


def test_a_larger_bound_lets_those_in_who_wait() -> None:
    admission = Admission(limits(deliveries_max=9, tenant_deliveries_max=1))
    begin(admission, "a")
    first, second, third = (wait(admission, "a") for _ in range(3))
    assert admission.configure({"a": TenantShare(deliveries_max=3)}) == [first, second]
    assert admission.configure({"a": TenantShare(deliveries_max=1)}) == []
    assert admission.leave("a", 1.0) == []
    assert admission.leave("a", 1.0) == []
    assert admission.leave("a", 1.0) == [third]


# --- the queues ---


@pytest.mark.parametrize("queue_max", [0, 1, 5])
def test_more_than_scheduler_queue_max_requests_of_a_tenant_are_refused(queue_max: int) -> None:
    admission = Admission(limits(tenant_deliveries_max=1, queue_max=queue_max))
    begin(admission, "a")
    for _ in range(queue_max):
        wait(admission, "a")
    with pytest.raises(Busy, match=rf"scheduler\.queue_max is {queue_max}") as caught:
        admission.enter("a", 0.0)
    assert "1 deliveries of 'a' are running, scheduler.tenant_deliveries_max is 1" in str(
        caught.value
    )
    assert admission.waiting == queue_max
    begin(admission, "b")


@pytest.mark.parametrize(("queue_max", "waiting_max"), [(1, 1024), (300, 1200)])
def test_all_queues_together_are_bounded(queue_max: int, waiting_max: int) -> None:
    admission = Admission(limits(deliveries_max=1, queue_max=queue_max))
    begin(admission, "first")
    for index in range(waiting_max):
        wait(admission, str(index))
    with pytest.raises(
        Busy, match=f"{waiting_max} requests of all tenants wait, at most {waiting_max} may"
    ):
        admission.enter("last", 0.0)


def test_what_is_refused_names_the_bound_of_the_whole_server() -> None:
    admission = Admission(limits(deliveries_max=1, queue_max=0))
    begin(admission, "a")
    with pytest.raises(
        Busy, match=r"1 deliveries are running, 0 of them of 'b'; storage\.deliveries_max is 1"
    ):
        admission.enter("b", 0.0)


def test_what_waited_for_scheduler_queue_timeout_s_is_refused_and_the_rest_waits_on() -> None:
    admission = Admission(limits(deliveries_max=1, queue_timeout_s=2.0))
    begin(admission, "a")
    early, late = wait(admission, "a", 0.0), wait(admission, "b", 1.0)
    assert admission.next_expiry_s == 2.0
    assert admission.expired(1.999) == []
    ((token, error),) = admission.expired(2.0)
    assert token is early
    assert "waited 2 s for its turn (scheduler.queue_timeout_s)" in error.message
    assert admission.next_expiry_s == 3.0
    assert admission.leave("a", 1.0) == [late]
    assert admission.next_expiry_s is None


def test_whoever_gives_up_holds_nobody_up() -> None:
    admission = Admission(limits(deliveries_max=1))
    begin(admission, "a")
    first, second = wait(admission, "a"), wait(admission, "a")
    admission.give_up(first)
    admission.give_up(first)
    assert admission.leave("a", 1.0) == [second]
    admission.give_up(second)  # it waits no longer: no effect
    assert (admission.running, admission.waiting) == (1, 0)


# --- whose turn it is ---


def order(admission: Admission, running: str, count: int) -> str:
    """Which tenants begin one after the other where one delivery runs at a time."""
    begun = ""
    for _ in range(count):
        (token,) = admission.leave(running, 1.0)
        running = token.tenant
        begun += running
    return begun


def test_a_long_queue_holds_up_its_own_tenant_alone() -> None:
    admission = Admission(limits(deliveries_max=1, queue_max=50))
    begin(admission, "a")
    for _ in range(50):
        wait(admission, "a")
    wait(admission, "b", 1.0)
    wait(admission, "c", 2.0)
    assert order(admission, "a", 6) == "bcaaaa"


def test_tenants_take_turns_by_weight() -> None:
    admission = Admission(limits(deliveries_max=1, queue_max=50), {"a": TenantShare(weight=3)})
    begin(admission, "x")
    for tenant in "abc" * 40:
        wait(admission, tenant)
    assert Counter(order(admission, "x", 50)) == {"a": 30, "b": 10, "c": 10}


def test_places_are_held_by_weight() -> None:
    admission = Admission(
        limits(deliveries_max=32, tenant_deliveries_max=32, queue_max=50),
        {"a": TenantShare(weight=3)},
    )
    begin(admission, "x", 24)
    begin(admission, "y", 4)
    for tenant in "ab" * 20:
        admission.enter(tenant, 0.0)
    for _ in range(24):
        admission.leave("x", 1.0)
    held = {tenant: admission._running.held(tenant) for tenant in "ab"}
    assert held == {"a": 18, "b": 6}


def test_a_tenant_that_was_away_has_saved_no_turns_up() -> None:
    admission = Admission(limits(deliveries_max=1, queue_max=50))
    begin(admission, "a")
    for _ in range(20):
        wait(admission, "a")
    assert order(admission, "a", 10) == "a" * 10
    for _ in range(20):
        wait(admission, "b")
    assert Counter(order(admission, "a", 8)) == {"a": 4, "b": 4}


# --- when to come back ---


def refused_after_s(admission: Admission, tenant: str) -> float:
    with pytest.raises(Busy) as caught:
        admission.enter(tenant, 0.0)
    assert caught.value.details.retry_after_s is not None
    return caught.value.details.retry_after_s


def test_who_is_refused_comes_back_when_the_queue_should_have_begun() -> None:
    admission = Admission(limits(deliveries_max=9, tenant_deliveries_max=2, queue_max=3))
    begin(admission, "a", 2)
    for _ in range(100):
        admission.leave("a", 0.5)
        begin(admission, "a")
    for _ in range(3):
        wait(admission, "a")
    assert refused_after_s(admission, "a") == pytest.approx(0.5 * 4 / 2)


def test_who_has_had_no_delivery_goes_by_what_others_took() -> None:
    admission = Admission(limits(deliveries_max=1, queue_max=0))
    begin(admission, "a")
    assert refused_after_s(admission, "b") == DURATION_UNKNOWN_S
    for _ in range(100):
        admission.leave("a", 4.0)
        begin(admission, "a")
    assert refused_after_s(admission, "b") == pytest.approx(4.0)


@pytest.mark.parametrize(("duration_s", "retry_after_s"), [(1e-6, 0.1), (1e6, 30.0)])
def test_nobody_is_sent_away_for_less_or_more_than_the_bounds(
    duration_s: float, retry_after_s: float
) -> None:
    admission = Admission(limits(deliveries_max=1, queue_max=0))
    begin(admission, "a")
    admission.leave("a", duration_s)
    begin(admission, "a")
    assert refused_after_s(admission, "a") == retry_after_s


def test_tenants_that_come_once_are_forgotten() -> None:
    admission = Admission(limits())
    for index in range(IDLE_TENANTS_MAX + 100):
        begin(admission, str(index))
        admission.leave(str(index), 1.0)
    assert len(admission._durations_s) == IDLE_TENANTS_MAX
    assert not admission._queues._turns


# --- the model ---


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of requests, ends, retreats, expiries and changes of the shares."""

    @initialize(
        deliveries_max=st.integers(1, 6),
        tenant_deliveries_max=st.integers(1, 4),
        queue_max=st.integers(0, 4),
    )
    def start(self, deliveries_max: int, tenant_deliveries_max: int, queue_max: int) -> None:
        self.limits = limits(deliveries_max, tenant_deliveries_max, queue_max)
        self.admission = Admission(self.limits)
        self.shares: dict[str, TenantShare] = {}
        self.running: Counter[str] = Counter()
        self.fair = FairShares(deliveries_max)
        self.queues: dict[str, list[Waiting]] = {tenant: [] for tenant in TENANTS}
        self.now_s = 0.0

    def share(self, tenant: str) -> TenantShare:
        return self.shares.get(tenant, TenantShare())

    def has_room(self, tenant: str) -> bool:
        most = self.share(tenant).deliveries_max or self.limits.tenant_deliveries_max
        fair = self.fair.may_take(tenant, 1, self.share(tenant).weight)
        return fair and self.running[tenant] < most

    def begin(self, tenant: str) -> None:
        self.running[tenant] += 1
        self.fair.take(tenant, 1)

    def begun(self, tokens: list[Waiting]) -> None:
        """Each that begins has room, is the first of its queue, and no tenant has less."""
        for token in tokens:
            ready = [one for one in TENANTS if self.queues[one] and self.has_room(one)]
            assert token.tenant in ready
            assert self.queues[token.tenant].pop(0) is token
            held = {one: self.running[one] / self.share(one).weight for one in ready}
            assert held[token.tenant] == min(held.values())
            self.begin(token.tenant)

    @rule(tenant=st.sampled_from(TENANTS))
    def enter(self, tenant: str) -> None:
        has_room, queue = self.has_room(tenant), self.queues[tenant]
        if not has_room and len(queue) == self.limits.queue_max:
            assert 0.1 <= refused_after_s(self.admission, tenant) <= 30.0
            return
        token = self.admission.enter(tenant, self.now_s)
        if token is None:
            assert has_room
            assert not queue
            self.begin(tenant)
        else:
            assert not has_room
            queue.append(token)

    @rule(tenant=st.sampled_from(TENANTS), duration_s=st.floats(0.0, 100.0))
    def leave(self, tenant: str, duration_s: float) -> None:
        if self.running[tenant]:
            self.running[tenant] -= 1
            self.fair.give_back(tenant, 1)
            self.begun(self.admission.leave(tenant, duration_s))

    @rule(tenant=st.sampled_from(TENANTS), place=st.integers(0, 3))
    def give_up(self, tenant: str, place: int) -> None:
        if place < len(self.queues[tenant]):
            self.admission.give_up(self.queues[tenant].pop(place))

    @rule(passed_s=st.sampled_from([0.0, 1.0, 4.0, 11.0]))
    def expire(self, passed_s: float) -> None:
        self.now_s += passed_s
        for token, _ in self.admission.expired(self.now_s):
            assert token.since_s + self.limits.queue_timeout_s <= self.now_s
            assert self.queues[token.tenant].pop(0) is token

    @rule(
        tenant=st.sampled_from(TENANTS),
        weight=st.sampled_from(WEIGHTS),
        deliveries_max=st.integers(0, 4),
    )
    def configure(self, tenant: str, weight: float, deliveries_max: int) -> None:
        self.shares[tenant] = TenantShare(weight=weight, deliveries_max=deliveries_max)
        self.begun(self.admission.configure(self.shares))

    @precondition(lambda self: any(self.queues.values()))
    @rule()
    def all_that_wait_begin_in_the_end(self) -> None:
        while any(self.queues.values()):
            tenant = next(one for one in TENANTS if self.running[one])
            self.leave(tenant, 1.0)

    @invariant()
    def no_place_is_lost(self) -> None:
        if hasattr(self, "admission"):
            assert self.admission.running == self.running.total() <= self.limits.deliveries_max
            assert self.admission.waiting == sum(map(len, self.queues.values()))
            assert not [one for one in TENANTS if self.queues[one] and self.has_room(one)]


TestAdmissionMachine = AdmissionMachine.TestCase
