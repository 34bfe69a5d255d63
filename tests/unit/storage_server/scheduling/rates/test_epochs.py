"""Rates that are worked out again at every epoch, under virtual time."""

from __future__ import annotations

import math

import pytest

from objectcache_schemas.operators.schedule import TenantShare
from objectcache_schemas.policy_names import FOR_LIFE, PolicyName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.delivery_flow import FLOW_CATCH_UP_S
from objectcache_storage_server.scheduling.rates import policies, rated_pool
from objectcache_storage_server.scheduling.rates.assign_at_epochs import STARTED_MAX
from objectcache_storage_server.scheduling.rates.policies import RATE_POLICIES, assigned_rates
from objectcache_storage_server.scheduling.scheduler import BYTES_PER_GBIT, Scheduler, Wait
from tests.scheduled_jobs import Job, run
from tests.schedules import a_configuration

EPOCH_S = 0.01
CAP = BYTES_PER_GBIT  # bytes per second; of `a_scheduler`
LONG, SHORT = Demand(1 << 18, 0.1, 256), Demand(1 << 18, 0.1, 8)


def a_scheduler(policy: PolicyName = "equal", **tenants: TenantShare) -> Scheduler[Job]:
    configuration = a_configuration(policy, 1.0, margin_gbps=0.05, epoch_s=EPOCH_S, tenants=tenants)
    return Scheduler(configuration, 0.0)


def begin(
    scheduler: Scheduler[Job],
    demand: Demand,
    now_s: float = 0.0,
    *,
    pooled: bool = True,
    rate_max: float = math.inf,
) -> Job:
    job = Job(demand, int(min(scheduler.fragment_bytes_max(), demand.layer_bytes)))
    scheduler.add(job, demand, now_s, pooled=pooled, rate_max=rate_max)
    return job


# --- when ---


def test_who_comes_to_an_idle_link_begins_at_once_and_alone_has_all_of_it() -> None:
    scheduler = a_scheduler()
    job = begin(scheduler, SHORT, 3.0)
    run(scheduler, 3.0)
    assert job.rates == [pytest.approx(CAP)]
    assert job.first_s == 3.0


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_nobody_waits_for_longer_than_an_epoch(policy: PolicyName) -> None:
    scheduler = a_scheduler(policy)
    begin(scheduler, LONG)
    now_s = 0.0
    for number in range(1, 40):
        at_s = number * 0.0137
        now_s = run(scheduler, now_s, at_s)
        newcomer = begin(scheduler, LONG, at_s)
        now_s = run(scheduler, now_s, at_s + EPOCH_S)
        assert len(newcomer.rates) >= 1
        scheduler.remove(newcomer, now_s)


def test_between_two_divisions_lies_an_epoch() -> None:
    scheduler = a_scheduler()
    first = begin(scheduler, LONG)
    now_s = run(scheduler, 0.0, 1e-4)
    others = list[Job]()
    for number in range(9):
        now_s = run(scheduler, now_s, 0.001 * (number + 1))
        others.append(begin(scheduler, LONG, now_s))
    now_s = run(scheduler, now_s, EPOCH_S - 1e-6)
    assert [job.rates for job in (first, *others)] == [[pytest.approx(CAP)], *[[]] * 9]
    run(scheduler, now_s, EPOCH_S)
    assert first.rates[1:] == [pytest.approx(CAP / 10)]
    assert [job.rates for job in others] == [[pytest.approx(CAP / 10)]] * 9


def test_what_an_early_finisher_leaves_is_divided_within_an_epoch() -> None:
    scheduler = a_scheduler()
    short, long = begin(scheduler, SHORT), begin(scheduler, LONG)
    run(scheduler)
    assert short.rates == [pytest.approx(CAP / 2)]
    assert long.rates == [pytest.approx(CAP / 2), pytest.approx(CAP)]
    both_bytes = short.demand.payload_bytes + long.demand.payload_bytes
    assert long.last_s == pytest.approx(both_bytes / CAP, abs=2 * EPOCH_S)


# --- over what ---


def test_kv_prop_goes_by_what_is_left() -> None:
    """Whoever has less to send, because it came first, has a rate in proportion."""
    scheduler = a_scheduler("kv_prop")
    early = begin(scheduler, Demand(1 << 18, 0.1, 64))
    now_s = run(scheduler, 0.0, 0.1)
    late = begin(scheduler, Demand(1 << 18, 0.1, 64), now_s)
    now_s = run(scheduler, now_s, now_s + EPOCH_S)
    flow = scheduler.flow(early)
    assert flow is not None
    assert flow.left.num_layers == pytest.approx(64 - now_s * CAP / (1 << 18), abs=2)
    expected = assigned_rates("kv_prop", [flow.left, late.demand], CAP)
    assert [early.rates[-1], late.rates[-1]] == pytest.approx(expected, rel=0.05)
    run(scheduler, now_s)
    assert late.last_s == pytest.approx(early.last_s, abs=0.03)  # who shares, ends together


def test_a_window_that_was_measured_changes_a_rate() -> None:
    scheduler = a_scheduler("stall_opt")
    job = begin(scheduler, Demand(1 << 18, 0.1, 256))
    now_s = run(scheduler, 0.0, 0.02)
    for layers in (1, 2, 3):
        scheduler.consumed(job, layers, now_s, 0.05)
    run(scheduler, now_s, now_s + EPOCH_S)
    assert job.rates == [pytest.approx((1 << 18) / 0.1), pytest.approx((1 << 18) / 0.05)]


@pytest.mark.parametrize("policy", ["equal", "kv_prop", "bw_prop"])
def test_what_a_client_does_not_want_goes_to_the_others(policy: PolicyName) -> None:
    scheduler = a_scheduler(policy)
    modest = begin(scheduler, LONG, rate_max=0.1 * CAP)
    other = begin(scheduler, LONG)
    run(scheduler, 0.0, EPOCH_S)
    assert [modest.rates, other.rates] == [[0.1 * CAP], [pytest.approx(0.9 * CAP)]]


def test_a_tenants_deliveries_divide_its_cap_and_the_rest_goes_to_the_others() -> None:
    scheduler = a_scheduler("equal", small=TenantShare(cap_gbps=0.1))
    small = Demand(1 << 18, 0.1, 256, tenant="small")
    jobs = [begin(scheduler, small), begin(scheduler, LONG)]
    now_s = run(scheduler, 0.0, 0.02)
    jobs.append(begin(scheduler, small, now_s))
    run(scheduler, now_s, now_s + EPOCH_S)
    assert [job.rates[-1] for job in jobs] == pytest.approx([0.05 * CAP, 0.9 * CAP, 0.05 * CAP])


def test_deliveries_outside_of_the_pool_get_their_share_within_an_epoch() -> None:
    scheduler = a_scheduler("equal")
    pooled = begin(scheduler, LONG)
    now_s = run(scheduler, 0.0, 0.02)
    fair = begin(scheduler, Demand(1 << 18, None, 64), now_s, pooled=False)
    now_s = run(scheduler, now_s, now_s + EPOCH_S)
    assert pooled.rates == [pytest.approx(CAP), pytest.approx(CAP / 2)]
    before_bytes = fair.taken_bytes
    run(scheduler, now_s, now_s + 0.1)
    assert fair.taken_bytes - before_bytes == pytest.approx(0.1 * CAP / 2, rel=0.05)
    scheduler.remove(fair, now_s + 0.1)
    run(scheduler, now_s + 0.1, now_s + 0.1 + EPOCH_S)
    assert pooled.rates[2:] == [pytest.approx(CAP)]


# --- those that sleep ---


def test_the_rate_of_who_sleeps_goes_to_the_others_until_it_wakes() -> None:
    scheduler = a_scheduler()
    slow = begin(scheduler, LONG)
    slow.room = 3
    other = begin(scheduler, LONG)
    now_s = run(scheduler, 0.0, 2 * FLOW_CATCH_UP_S)
    assert [slow.rates, other.rates] == [
        [pytest.approx(CAP / 2)],
        [pytest.approx(CAP / 2), pytest.approx(CAP)],
    ]
    assert scheduler.assigned_bytes_per_s == pytest.approx(CAP)
    slow.room = math.inf
    scheduler.wake(slow, now_s)
    run(scheduler, now_s, now_s + EPOCH_S)
    assert other.rates[2:] == [pytest.approx(CAP / 2)]
    assert slow.rates == [pytest.approx(CAP / 2)]


def test_who_has_sent_everything_leaves_its_rate_to_the_others() -> None:
    """It is still there: its client has not taken the end, which is long at its rate."""
    scheduler = a_scheduler()
    end = Demand(1 << 24, 0.1, 1)  # 0.27 s at half of the cap
    sent = Job(end, end.layer_bytes)
    scheduler.add(sent, end, 0.0, pooled=True)
    other = begin(scheduler, LONG)
    now_s = 0.0
    while not sent.is_taken:
        step = scheduler.next(now_s)
        now_s = max(now_s, step.until_s) if isinstance(step, Wait) else now_s
    run(scheduler, now_s, now_s + EPOCH_S)
    assert other.rates == [pytest.approx(CAP / 2), pytest.approx(CAP)]
    assert scheduler.assigned_bytes_per_s == pytest.approx(CAP)
    scheduler.wake(sent, now_s + EPOCH_S)
    run(scheduler, now_s + EPOCH_S, now_s + 5 * EPOCH_S)
    assert len(other.rates) == 2


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_where_everybody_sleeps_no_epoch_ends(policy: PolicyName) -> None:
    scheduler = a_scheduler(policy)
    for _ in range(2):
        begin(scheduler, LONG).room = 3
    now_s = run(scheduler, 0.0, 3 * FLOW_CATCH_UP_S)
    assert scheduler.next(now_s) == Wait(math.inf)


# --- pacing ---


def test_rates_that_change_at_every_epoch_are_achieved() -> None:
    """Whoever was held up by long fragments of another's catches up after a change too."""
    scheduler = a_scheduler("equal", heavy=TenantShare(weight=4.0))
    heavy = begin(scheduler, Demand(1 << 16, 0.1, 40_000, tenant="heavy"))
    long = Demand(1 << 20, 0.1, 4000)  # 8 ms of the link
    light = Job(long, long.layer_bytes)
    scheduler.add(light, long, 0.0, pooled=True)
    now_s = 0.0
    for number in range(200):  # another one comes and goes, so that rates change
        passing = Job(SHORT, 1, room=0)
        scheduler.add(passing, SHORT, now_s, pooled=True)
        now_s = run(scheduler, now_s, (2 * number + 1) * EPOCH_S)
        scheduler.remove(passing, now_s)
        now_s = run(scheduler, now_s, (2 * number + 2) * EPOCH_S)
    assert heavy.rates[-2:] == [pytest.approx(CAP * 4 / 6), pytest.approx(CAP * 4 / 5)]
    mean_rate = CAP * (4 / 6 + 4 / 5) / 2
    assert heavy.taken_bytes == pytest.approx(mean_rate * now_s, rel=0.02)


# --- steps ---


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_of_a_thousand_no_decision_computes_rates_twice_or_starts_many(
    policy: PolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, told = 0, 0

    def counted(*args: object, **kwargs: object) -> list[float]:
        nonlocal computed
        computed += 1
        return policies.assigned_rates(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(rated_pool, "assigned_rates", counted)
    scheduler = a_scheduler(policy)
    demands = [Demand(1 << (12 + number % 4), 0.1, 400) for number in range(1000)]
    jobs = [begin(scheduler, demand) for demand in demands]
    for now_s in (0.0, EPOCH_S, 2 * EPOCH_S):
        for _ in range(100):
            before, computed = told, 0
            scheduler.next(now_s)
            told = sum(len(job.rates) for job in jobs)
            assert told - before <= STARTED_MAX
            assert computed <= 1
            assert scheduler.assigned_bytes_per_s <= CAP * (1 + 1e-9)
        scheduler.remove(jobs[0], now_s)
        jobs.pop(0)
    assert all(job.rates for job in jobs)


def test_while_many_get_other_rates_these_never_add_up_to_more_than_the_cap() -> None:
    scheduler = a_scheduler("bw_prop")
    jobs = [begin(scheduler, Demand(1 << 16, 0.1, 400)) for _ in range(200)]
    now_s = run(scheduler, 0.0, 0.02)
    for layers in (1, 2, 3):  # the first needs more than was said: the others have less
        scheduler.consumed(jobs[0], layers, now_s, 0.01)
    told = sum(len(job.rates) for job in jobs)
    while not all(len(job.rates) == 2 for job in jobs):
        now_s += 1e-4
        scheduler.next(now_s)
        assert scheduler.assigned_bytes_per_s <= CAP * (1 + 1e-9)
    assert told == len(jobs)


# --- the other way ---


def test_how_long_rates_hold_can_be_changed_while_deliveries_run() -> None:
    scheduler = a_scheduler()
    first = begin(scheduler, LONG)
    now_s = run(scheduler, 0.0, 0.02)
    for_life = a_configuration("equal", 1.0, epoch_s=EPOCH_S, rates=FOR_LIFE)
    scheduler.configure(for_life, now_s)
    late = begin(scheduler, LONG, now_s)
    now_s = run(scheduler, now_s, now_s + 5 * EPOCH_S)
    assert first.rates[-1] == pytest.approx(CAP)
    assert late.rates == []
    scheduler.configure(a_configuration("equal", 1.0, epoch_s=EPOCH_S), now_s)
    run(scheduler, now_s, now_s + 1e-4)
    assert [first.rates[-1], late.rates[-1]] == [pytest.approx(CAP / 2)] * 2
