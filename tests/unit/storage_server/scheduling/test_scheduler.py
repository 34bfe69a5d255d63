"""Epochs, rates, shares and what changes while the scheduler runs, under virtual time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from objectcache_schemas.descriptor import RATE_MIN
from objectcache_schemas.operators.schedule import TenantShare
from objectcache_schemas.policy_names import EVERY_EPOCH, FOR_LIFE, PolicyName, RatesName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.delivery_flow import FLOW_CATCH_UP_S
from objectcache_storage_server.scheduling.lanes.split_link import FAIR_FLOOR
from objectcache_storage_server.scheduling.rates.policies import RATE_POLICIES, assigned_rates
from objectcache_storage_server.scheduling.scheduler import (
    BYTES_PER_GBIT,
    NextFragment,
    Scheduler,
    Wait,
)
from tests.scheduled_jobs import Job, busiest_window_bytes, run
from tests.schedules import a_configuration
from tests.unit.storage_server.scheduling.paper_tables import WORKLOADS

SCALE = 100  # bytes and rates, so that the tests are quick
EPOCH_S = 0.01
POLICIES: tuple[PolicyName, ...] = (
    "equal",
    "kv_prop",
    "bw_prop",
    "stall_opt",
    "calibrated_stall_opt",
    "stall_dynamic",
)


def scaled(demand: Demand) -> Demand:
    return Demand(demand.layer_bytes // SCALE, demand.compute_window_s, demand.num_layers)


def a_job(scheduler: Scheduler[Job], demand: Demand, pieces: int = 1) -> Job:
    """Fragments as the server makes them for this cap."""
    most = min(scheduler.fragment_bytes_max(), float(1 << 20))
    return Job(demand, max(1, int(min(most, demand.layer_bytes / pieces))))


def a_scheduler(
    policy: PolicyName, cap_gbps: float, rates: RatesName = EVERY_EPOCH, **tenants: TenantShare
) -> Scheduler[Job]:
    configuration = a_configuration(
        policy, cap_gbps, margin_gbps=5 / SCALE, epoch_s=EPOCH_S, rates=rates, tenants=tenants
    )
    return Scheduler(configuration, 0.0)


def begin(
    scheduler: Scheduler[Job],
    demand: Demand,
    now_s: float = 0.0,
    *,
    pooled: bool = True,
    rate_max: float = math.inf,
) -> Job:
    job = a_job(scheduler, demand)
    scheduler.add(job, demand, now_s, pooled=pooled, rate_max=rate_max)
    return job


def assert_all_sent(*jobs: Job) -> None:
    for job in jobs:
        offsets = [fragment.offset_bytes for _, fragment in job.sent]
        ends = [fragment.offset_bytes + fragment.length_bytes for _, fragment in job.sent]
        assert offsets == [0, *ends[:-1]]
        assert ends[-1] == job.demand.payload_bytes


# --- rates ---


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_every_delivery_gets_its_assigned_rate_over_its_life(
    workload: str, policy: PolicyName
) -> None:
    shared = WORKLOADS[workload]
    cap = shared.cap_bytes_per_s / SCALE
    scheduler = a_scheduler(policy, shared.cap_gbps / SCALE, FOR_LIFE)
    jobs = [begin(scheduler, scaled(demand)) for demand in shared.demands]
    run(scheduler)
    assert_all_sent(*jobs)
    margin = 5 / SCALE * BYTES_PER_GBIT
    wanted = assigned_rates(policy, [job.demand for job in jobs], cap, margin)
    for job, rate in zip(jobs, wanted, strict=True):
        assert job.rates == [pytest.approx(rate)]
        assert job.achieved_bytes_per_s == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_sum_stays_within_the_cap_over_any_fifth_of_a_second(
    workload: str, policy: PolicyName
) -> None:
    shared = WORKLOADS[workload]
    scheduler = a_scheduler(policy, shared.cap_gbps / SCALE)
    jobs = [begin(scheduler, scaled(demand)) for demand in shared.demands]
    jobs.append(begin(scheduler, Demand(1 << 18, None, 32), pooled=False))
    run(scheduler)
    assert_all_sent(*jobs)
    assert busiest_window_bytes(jobs, 0.2) <= 1.02 * 0.2 * shared.cap_bytes_per_s / SCALE


def test_a_dispatcher_that_wakes_late_catches_up_but_not_beyond_the_cap() -> None:
    cap = 1e8
    scheduler = a_scheduler("stall_dynamic", cap / BYTES_PER_GBIT)
    job = begin(scheduler, Demand(1 << 22, 0.01, 16))
    now_s = 0.0
    while not job.is_taken:
        step = scheduler.next(now_s)
        if isinstance(step, Wait):
            now_s = step.until_s + 0.0015  # as a thread does
        else:
            job.sent.append((now_s, step.fragment))
    assert busiest_window_bytes([job], 0.2) <= 1.02 * 0.2 * cap
    assert job.achieved_bytes_per_s == pytest.approx(cap, rel=0.03)


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_no_delivery_waits_longer_for_a_fragment_than_its_share_implies(
    policy: PolicyName,
) -> None:
    shared = WORKLOADS["C"]
    cap = shared.cap_bytes_per_s / SCALE
    scheduler = a_scheduler(policy, shared.cap_gbps / SCALE)
    jobs = [begin(scheduler, scaled(demand)) for demand in shared.demands]
    run(scheduler)
    others_s = sum(job.fragment_bytes for job in jobs) / cap
    for job in jobs:
        rate = job.rates[0]
        assert rate is not None
        longest_s = max(after - before for (before, _), (after, _) in pairwise(job.sent))
        assert longest_s <= job.fragment_bytes / rate + others_s


def test_a_client_may_ask_for_less_than_it_would_get() -> None:
    for policy in POLICIES:
        scheduler = a_scheduler(policy, 8.0)
        slow = begin(scheduler, Demand(1 << 20, 0.001, 8), rate_max=5e7)
        fast = begin(scheduler, Demand(1 << 20, 0.001, 8))
        run(scheduler)
        assert slow.achieved_bytes_per_s == pytest.approx(5e7, rel=0.03)
        assert fast.achieved_bytes_per_s > 1e8
        assert slow.rates == [None if policy == "stall_dynamic" else 5e7]


# --- epochs ---


def test_who_comes_between_epochs_is_admitted_at_the_end_of_the_next() -> None:
    scheduler = a_scheduler("calibrated_stall_opt", 1.0, FOR_LIFE)
    first = begin(scheduler, Demand(1 << 16, 0.1, 32))
    run(scheduler, 0.0, EPOCH_S / 2)
    assert first.rates == []
    second = begin(scheduler, Demand(1 << 16, 0.1, 32), EPOCH_S / 2)
    run(scheduler, EPOCH_S / 2)
    assert_all_sent(first, second)
    assert first.first_s == second.first_s == pytest.approx(EPOCH_S, abs=0.002)
    assert first.rates == second.rates


def test_who_comes_to_an_idle_link_together_divides_it() -> None:
    scheduler = a_scheduler("equal", 1.0, FOR_LIFE)
    begin(scheduler, Demand(1 << 10, 0.1, 2))
    run(scheduler, 0.0, 3.0)
    jobs = [begin(scheduler, Demand(1 << 16, 0.1, 32), 3.0 + late) for late in (0.0, 0.002)]
    run(scheduler, 3.002)
    cap = 1.0 * BYTES_PER_GBIT
    assert [job.rates for job in jobs] == [[cap / 2], [cap / 2]]


def test_what_is_freed_goes_to_the_next_admission_and_not_to_running_deliveries() -> None:
    cap = 1.0 * BYTES_PER_GBIT
    scheduler = a_scheduler("equal", 1.0, FOR_LIFE)
    short = begin(scheduler, Demand(1 << 18, 0.1, 2))
    long = begin(scheduler, Demand(1 << 18, 0.1, 256))
    run(scheduler, 0.0, 0.5)
    assert short.is_taken
    assert long.achieved_bytes_per_s == pytest.approx(cap / 2, rel=0.03)
    late = begin(scheduler, Demand(1 << 18, 0.1, 2), 0.5)
    run(scheduler, 0.5, 0.5 + 2 * EPOCH_S)
    assert late.rates == [pytest.approx(cap / 2)]
    run(scheduler, 0.5 + 2 * EPOCH_S)
    assert long.rates == [pytest.approx(cap / 2)]
    assert long.achieved_bytes_per_s == pytest.approx(cap / 2, rel=0.03)


def test_a_newcomer_waits_where_less_than_half_of_its_fair_rate_is_free() -> None:
    scheduler = a_scheduler("equal", 1.0, FOR_LIFE)
    cap = 1.0 * BYTES_PER_GBIT
    running = [begin(scheduler, Demand(1 << 18, 0.1, layers)) for layers in (8, 16, 64)]
    run(scheduler, 0.0, 0.02)
    assert [job.rates for job in running] == [[pytest.approx(cap / 3)]] * 3
    newcomer = begin(scheduler, Demand(1 << 18, 0.1, 8), 0.02)
    run(scheduler, 0.02, running_end_s(running[0], cap / 3) - 0.01)
    assert newcomer.rates == []
    run(scheduler, running_end_s(running[0], cap / 3) - 0.01)
    assert newcomer.rates == [pytest.approx(cap / 3, rel=0.01)]
    assert newcomer.first_s == pytest.approx(running[0].last_s, abs=2 * EPOCH_S)


def running_end_s(job: Job, rate: float) -> float:
    return EPOCH_S + job.demand.payload_bytes / rate


def test_who_waits_is_admitted_in_order_of_arrival_as_far_as_there_is_room() -> None:
    scheduler = a_scheduler("equal", 1.0, FOR_LIFE)
    running = [begin(scheduler, Demand(1 << 18, 0.1, 8 if n < 2 else 200)) for n in range(4)]
    run(scheduler, 0.0, 0.02)
    waiting = [begin(scheduler, Demand(1 << 16, 0.1, 4), 0.02 + n / 1e4) for n in range(12)]
    run(scheduler, 0.03)
    assert_all_sent(*running, *waiting)
    starts = [job.first_s for job in waiting]
    assert starts == sorted(starts)
    assert starts[-1] > starts[0]


def test_a_delivery_that_waited_for_its_rate_does_not_catch_up_for_the_wait() -> None:
    scheduler = a_scheduler("equal", 1.0, FOR_LIFE)
    first = begin(scheduler, Demand(1 << 18, 0.1, 32))
    run(scheduler, 0.0, 0.02)
    late = begin(scheduler, Demand(1 << 16, 0.1, 32), 0.02)
    run(scheduler, 0.02)
    assert late.first_s >= first.last_s
    assert late.achieved_bytes_per_s == pytest.approx(1.0 * BYTES_PER_GBIT, rel=0.03)
    assert busiest_window_bytes([late], 0.01) <= 0.01 * BYTES_PER_GBIT + 2 * late.fragment_bytes


def test_a_cancelled_delivery_frees_its_rate_at_once() -> None:
    for policy in POLICIES:
        scheduler = a_scheduler(policy, 1.0)
        cancelled = begin(scheduler, Demand(1 << 20, 0.001, 32))
        run(scheduler, 0.0, 0.05)
        assert cancelled.sent
        scheduler.remove(cancelled, 0.05)
        scheduler.remove(cancelled, 0.05)
        other = begin(scheduler, Demand(1 << 18, 0.001, 8), 0.05)
        run(scheduler, 0.05)
        assert other.first_s <= 0.05 + EPOCH_S + 0.005
        assert other.achieved_bytes_per_s == pytest.approx(1.0 * BYTES_PER_GBIT, rel=0.03)


def test_a_delivery_cancelled_while_it_waits_begins_never() -> None:
    scheduler = a_scheduler("equal", 1.0)
    waiting = begin(scheduler, Demand(1 << 18, 0.1, 8))
    scheduler.remove(waiting, 0.001)
    run(scheduler, 0.001)
    assert (waiting.rates, waiting.sent) == ([], [])


def test_an_epoch_does_not_wait_for_a_long_fragment_on_the_link() -> None:
    scheduler = a_scheduler("equal", 0.01, FOR_LIFE)
    whole = Job(Demand(1 << 20, None, 2), 1 << 20)  # 0.8 s each
    scheduler.add(whole, whole.demand, 0.0, pooled=False)
    assert isinstance(scheduler.next(0.0), NextFragment)
    newcomer = begin(scheduler, Demand(1 << 16, 0.1, 2))
    assert scheduler.next(0.0) == Wait(EPOCH_S)
    run(scheduler, 0.0, 0.1)
    assert newcomer.rates == [pytest.approx(0.01 / 2 * BYTES_PER_GBIT)]
    assert newcomer.sent == []


# --- those that sleep ---


def asleep(scheduler: Scheduler[Job]) -> tuple[Job, float]:
    """A delivery whose client takes a few fragments and no more; since when."""
    job = begin(scheduler, Demand(1 << 18, 0.001, 64))
    job.room = 3
    run(scheduler, 0.0, 0.1)
    flow = scheduler.flow(job)
    assert flow is not None
    assert flow.asleep_since_s is not None
    return job, flow.asleep_since_s


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_the_rate_of_who_sleeps_for_long_is_free_for_newcomers(policy: PolicyName) -> None:
    scheduler = a_scheduler(policy, 0.1, FOR_LIFE)
    slow, since_s = asleep(scheduler)
    newcomer = begin(scheduler, Demand(1 << 18, 0.001, 64), 0.1)
    run(scheduler, 0.1, since_s + FLOW_CATCH_UP_S - 0.001)
    assert newcomer.rates == []
    run(scheduler, since_s + FLOW_CATCH_UP_S - 0.001)
    assert_all_sent(newcomer)
    assert newcomer.rates == slow.rates
    assert newcomer.first_s == pytest.approx(since_s + FLOW_CATCH_UP_S, abs=EPOCH_S)


def test_newcomers_are_not_compared_with_who_sleeps_for_long() -> None:
    """A fifteenth for each of three is half of an eighth, but not of a seventh: one has it all."""
    cap = 0.1 * BYTES_PER_GBIT
    scheduler = a_scheduler("equal", 0.1, FOR_LIFE)
    for _ in range(4):
        begin(scheduler, Demand(1 << 18, 0.001, 64))
    slow, since_s = asleep(scheduler)
    assert slow.rates == [pytest.approx(cap / 5)]
    coming_s = since_s + FLOW_CATCH_UP_S
    newcomers = [begin(scheduler, Demand(1 << 18, 0.001, 64), coming_s) for _ in range(3)]
    run(scheduler, coming_s, coming_s + 3 * EPOCH_S)
    assert [job.rates for job in newcomers] == [[pytest.approx(cap / 5)], [], []]


def test_who_sleeps_a_little_again_and_again_keeps_its_rate() -> None:
    scheduler = a_scheduler("equal", 0.1, FOR_LIFE)
    slow, since_s = asleep(scheduler)
    newcomer = begin(scheduler, Demand(1 << 18, 0.1, 8), 0.1)
    now_s = 0.1
    for turn in range(1, 8):
        now_s = run(scheduler, now_s, since_s + 0.9 * turn * FLOW_CATCH_UP_S)
        slow.room += 1
        scheduler.wake(slow, now_s)
    assert newcomer.rates == []


def test_who_wakes_has_its_rate_again_and_the_sum_stays_within_the_cap() -> None:
    cap = 0.1 * BYTES_PER_GBIT
    scheduler = a_scheduler("equal", 0.1, FOR_LIFE)
    slow, _ = asleep(scheduler)
    newcomer = begin(scheduler, Demand(1 << 18, 0.1, 200), 0.1)
    run(scheduler, 0.1, 1.0)
    slow.room = math.inf
    scheduler.wake(slow, 1.0)
    late = begin(scheduler, Demand(1 << 16, 0.1, 2), 1.0)
    run(scheduler, 1.0, 1.6)  # it has caught up
    before_bytes = slow.taken_bytes
    run(scheduler, 1.6, 2.2)
    assert slow.taken_bytes - before_bytes == pytest.approx(0.6 * cap / 2, rel=0.05)
    assert late.rates == []  # nothing is free any more
    run(scheduler, 2.2)
    assert_all_sent(slow, newcomer, late)
    assert slow.rates == newcomer.rates == [pytest.approx(cap)]
    assert busiest_window_bytes([slow, newcomer, late], 0.2) <= 1.02 * 0.2 * cap


def test_of_rates_that_are_assigned_anew_who_sleeps_takes_nothing_from_the_others() -> None:
    scheduler = a_scheduler("equal", 0.1, FOR_LIFE)
    cap = 0.1 * BYTES_PER_GBIT
    slow, _ = asleep(scheduler)
    awake = begin(scheduler, Demand(1 << 18, 0.1, 64), 0.1)
    run(scheduler, 0.1, 0.5)
    scheduler.configure(a_configuration("kv_prop", 0.2, epoch_s=EPOCH_S, rates=FOR_LIFE), 0.5)
    assert awake.rates == [pytest.approx(cap), pytest.approx(2 * cap)]
    assert slow.rates == [pytest.approx(cap), pytest.approx(cap)]
    slow.room = math.inf
    scheduler.wake(slow, 0.6)
    run(scheduler, 0.6)
    assert_all_sent(slow, awake)


# --- the others ---


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_cap_everything_goes_as_fast_as_it_is_taken(policy: PolicyName) -> None:
    scheduler = a_scheduler(policy, 0.0)
    jobs = [begin(scheduler, Demand(1 << 20, 0.01, 4), pooled=pooled) for pooled in (True, False)]
    steps = 0
    while not all(job.is_taken for job in jobs):
        step = scheduler.next(0.0)
        assert isinstance(step, NextFragment)
        step.job.sent.append((0.0, step.fragment))
        steps += 1
    assert_all_sent(*jobs)
    assert scheduler.next(0.0) == Wait(math.inf)
    assert [job.rates for job in jobs] == [[None], [None]]


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_deliveries_outside_of_the_pool_get_a_share_where_rates_leave_nothing(
    policy: PolicyName,
) -> None:
    cap = 1.0 * BYTES_PER_GBIT
    scheduler = a_scheduler(policy, 1.0, FOR_LIFE)
    pooled = [begin(scheduler, Demand(1 << 18, 0.001, 64)) for _ in range(2)]
    run(scheduler, 0.0, 0.05)
    fair = begin(scheduler, Demand(1 << 20, None, 32), 0.05, pooled=False)
    run(scheduler, 0.05, 0.25)
    floor_bytes = FAIR_FLOOR / (1 + FAIR_FLOOR) * cap * 0.2
    assert fair.taken_bytes >= 0.8 * floor_bytes
    run(scheduler, 0.25)
    for job in pooled:
        assert job.achieved_bytes_per_s == pytest.approx(cap / 2, rel=0.03)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_delivery_outside_of_the_pool_that_is_there_first_keeps_its_fair_share(
    policy: PolicyName,
) -> None:
    cap = 1.0 * BYTES_PER_GBIT
    scheduler = a_scheduler(policy, 1.0)
    fair = begin(scheduler, Demand(1 << 20, None, 64), pooled=False)
    for _ in range(3):
        begin(scheduler, Demand(1 << 18, 0.001, 400))
    run(scheduler, 0.0, 1.0)
    assert fair.taken_bytes >= 0.95 * cap / 4 * 0.99


def test_a_lane_that_was_idle_is_owed_nothing() -> None:
    scheduler = a_scheduler("stall_dynamic", 1.0)
    begin(scheduler, Demand(1 << 20, None, 400), pooled=False)
    run(scheduler, 0.0, 1.0)
    pooled = begin(scheduler, Demand(1 << 20, 0.001, 400), 1.0)
    run(scheduler, 1.0, 1.5)
    assert pooled.taken_bytes == pytest.approx(0.5 * 0.5 * BYTES_PER_GBIT, rel=0.05)


# --- tenants ---


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenants_cap_holds_and_the_others_take_what_it_leaves(policy: PolicyName) -> None:
    scheduler = a_scheduler(policy, 1.0, small=TenantShare(cap_gbps=0.1))
    capped = [begin(scheduler, Demand(1 << 16, 0.001, 16, tenant="small")) for _ in range(6)]
    free = begin(scheduler, Demand(1 << 20, 0.001, 64))
    run(scheduler)
    assert_all_sent(free, *capped)
    assert busiest_window_bytes(capped, 0.2) <= 1.02 * 0.02 * BYTES_PER_GBIT + (
        0.001 * BYTES_PER_GBIT
    )
    capped_bytes = sum(job.demand.payload_bytes for job in capped)
    last_s = max(job.last_s for job in capped)
    share = 0.1 if policy != "kv_prop" else capped_bytes / (capped_bytes + (64 << 20))
    assert last_s == pytest.approx(capped_bytes / (share * BYTES_PER_GBIT), rel=0.05)
    assert free.achieved_bytes_per_s >= 0.85 * BYTES_PER_GBIT


def test_a_change_of_something_else_forgives_a_tenant_nothing() -> None:
    small = TenantShare(cap_gbps=0.01)
    scheduler = a_scheduler("stall_dynamic", 1.0, small=small)
    job = begin(scheduler, Demand(1 << 20, 0.001, 16, tenant="small"))
    now_s = 0.0
    for turn in range(100):
        now_s = run(scheduler, now_s, turn * 0.01)
        scheduler.configure(
            a_configuration("stall_dynamic", 1.0 + turn, tenants={"small": small}), now_s
        )
    assert job.taken_bytes <= 0.01 * BYTES_PER_GBIT * now_s + 2 * job.fragment_bytes


def test_a_tenants_weight_is_its_share() -> None:
    scheduler = a_scheduler("equal", 1.0, heavy=TenantShare(weight=3.0))
    heavy = begin(scheduler, Demand(1 << 18, 0.1, 8, tenant="heavy"))
    light = begin(scheduler, Demand(1 << 18, 0.1, 8, tenant="light"))
    run(scheduler)
    cap = 1.0 * BYTES_PER_GBIT
    assert heavy.rates == [pytest.approx(0.75 * cap)]
    assert light.rates == [pytest.approx(0.25 * cap), pytest.approx(cap)]


def test_a_heavier_tenants_stalls_are_avoided_first() -> None:
    def last_of(weight: float) -> float:
        scheduler = a_scheduler("stall_dynamic", 1.0, heavy=TenantShare(weight=weight))
        heavy = begin(scheduler, Demand(1 << 19, 0.001, 16, tenant="heavy"))
        begin(scheduler, Demand(1 << 18, 0.001, 16, tenant="light"))
        run(scheduler)
        return heavy.last_s

    assert last_of(100.0) < 0.75 * last_of(1.0)


@pytest.mark.parametrize("policy", POLICIES)
def test_many_deliveries_of_one_tenant_weigh_no_more_than_one_of_another(
    policy: PolicyName,
) -> None:
    scheduler = a_scheduler(policy, 1.0)
    many = [
        begin(scheduler, Demand(1 << 20, None, 400, tenant="a"), pooled=False) for _ in range(20)
    ]
    one = begin(scheduler, Demand(1 << 20, 0.001, 400, tenant="b"))
    run(scheduler, 0.0, 1.0)
    share = one.taken_bytes / (one.taken_bytes + sum(job.taken_bytes for job in many))
    assert share == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pooled", [True, False])
def test_a_decision_does_not_look_at_all_flows_of_a_capped_tenant(
    policy: PolicyName, pooled: bool
) -> None:
    scheduler = a_scheduler(policy, 100.0, small=TenantShare(cap_gbps=0.01))
    demand = Demand(1 << 16, 0.001, 4, tenant="small")
    jobs = [begin(scheduler, demand, pooled=pooled) for _ in range(100)]
    now_s = EPOCH_S
    while not isinstance(step := scheduler.next(now_s), NextFragment):
        now_s = max(now_s, step.until_s)
    step.job.sent.append((now_s, step.fragment))
    now_s += 0.003  # the link is free, the tenant's cap is not
    in_place = 0
    while (step := scheduler.next(now_s)) == Wait(now_s):
        in_place += 1
    assert in_place >= len(jobs) // 16 - 2
    assert isinstance(step, Wait)
    assert step.until_s > now_s


# --- what consumption says ---


def test_a_gpu_that_is_faster_than_was_claimed_is_fed_sooner() -> None:
    scheduler = a_scheduler("stall_dynamic", 10.0)
    job = begin(scheduler, Demand(1 << 20, 0.1, 32))
    flow = scheduler.flow(job)
    assert flow is not None
    run(scheduler, 0.0, 0.001)
    flow.sent(16 << 20, 0.01)
    scheduler.consumed(job, 1, 0.01, 0.01)
    assert flow.demand.compute_window_s == 0.1  # one report is none
    for layers in range(2, 11):
        scheduler.consumed(job, layers, 0.01 * layers, 0.01)
    assert flow.demand.compute_window_s == pytest.approx(0.01)
    assert flow.origin_s + 10 * 0.01 == pytest.approx(0.1)
    assert flow.planned_s == flow.origin_s
    flow.begun_s = 0.0
    assert flow.origin_s >= flow.begun_s


def test_a_measured_window_changes_who_goes_first() -> None:
    """Of two alike the one whose GPU turns out to be quick has the next due layer."""
    scheduler = a_scheduler("stall_dynamic", 0.5)
    slow, quick = (begin(scheduler, Demand(1 << 16, 0.1, 64)) for _ in range(2))
    now_s = run(scheduler, 0.0, 0.05)
    for layers in (1, 2, 3):
        scheduler.consumed(quick, layers, now_s + layers * 1e-5, 0.002)
    before = (slow.taken_bytes, quick.taken_bytes)
    run(scheduler, now_s + 1e-4, now_s + 0.01)
    assert quick.taken_bytes - before[1] > 2 * (slow.taken_bytes - before[0])


def test_a_measured_window_that_differs_little_or_is_nonsense_changes_nothing() -> None:
    scheduler = a_scheduler("stall_dynamic", 10.0)
    job = begin(scheduler, Demand(1 << 20, 0.1, 32))
    flow = scheduler.flow(job)
    assert flow is not None
    for layers, compute_s in ((1, 0.12), (2, 0.0), (3, math.inf), (4, None), (5, 0.08)):
        scheduler.consumed(job, layers, 0.1 * layers, compute_s)
    assert flow.demand.compute_window_s == 0.1


def test_a_measured_window_cannot_claim_the_whole_link_and_a_rate_stays() -> None:
    for policy in ("stall_dynamic", "stall_opt"):
        scheduler = a_scheduler(policy, 1.0)
        job = begin(scheduler, Demand(1 << 20, 0.1, 32))
        run(scheduler, 0.0, 0.02)
        flow = scheduler.flow(job)
        assert flow is not None
        rates = list(job.rates)
        for layers in (1, 2, 3):
            scheduler.consumed(job, layers, 0.02, 1e-9)
        assert flow.demand.compute_window_s == pytest.approx((1 << 20) / (4 * BYTES_PER_GBIT))
        assert job.rates == rates


def test_a_long_window_holds_no_place_for_next_to_nothing() -> None:
    scheduler = a_scheduler("stall_opt", 1.0)
    job = begin(scheduler, Demand(1 << 20, 3600.0, 32))
    run(scheduler, 0.0, 0.02)
    assert job.rates == [pytest.approx(RATE_MIN)]


# --- another configuration ---


def test_a_window_that_a_low_cap_stretched_is_as_given_under_a_higher_one() -> None:
    scheduler = a_scheduler("stall_dynamic", 10.0)
    job = begin(scheduler, Demand(1 << 20, 0.002, 64))
    flow = scheduler.flow(job)
    assert flow is not None
    windows = []
    for cap_gbps in (0.01, 10.0):
        scheduler.configure(a_configuration("stall_dynamic", cap_gbps), 0.1)
        windows.append(flow.demand.compute_window_s)
    assert windows == [pytest.approx((1 << 20) / (0.04 * BYTES_PER_GBIT)), 0.002]


def test_a_higher_cap_of_a_tenant_holds_at_once_for_those_it_held() -> None:
    for policy in POLICIES:
        scheduler = a_scheduler(policy, 1.0, small=TenantShare(cap_gbps=1e-5))
        jobs = [begin(scheduler, Demand(1 << 14, 0.001, 16, tenant="small")) for _ in range(3)]
        run(scheduler, 0.0, 0.1)
        tenants = {"small": TenantShare(cap_gbps=0.5)}
        scheduler.configure(a_configuration(policy, 1.0, epoch_s=EPOCH_S, tenants=tenants), 0.1)
        run(scheduler, 0.1, 0.3)
        assert_all_sent(*jobs)


def test_a_change_forgives_no_debt_of_those_who_take_turns() -> None:
    scheduler = a_scheduler("stall_dynamic", 8.0)
    large = Job(Demand(8 << 20, None, 100), 8 << 20)
    small = Job(Demand(1 << 20, None, 1000), 1 << 20)
    for job in (large, small):
        scheduler.add(job, job.demand, 0.0, pooled=False)
    now_s = 0.0
    for turn in range(200):
        now_s = run(scheduler, now_s, turn * 0.002)
        scheduler.configure(a_configuration("stall_dynamic", 8.0), now_s)
    assert large.taken_bytes == pytest.approx(small.taken_bytes, abs=9 << 20)


# --- more than a plan is made for ---


def test_a_huge_delivery_among_a_stream_of_small_ones_ends() -> None:
    """The stream takes nine tenths of the link, for ever."""
    scheduler = a_scheduler("stall_dynamic", 1.0)
    huge = begin(scheduler, Demand(1 << 20, 0.01, 32))
    small = Demand(1 << 16, 0.002, 8)
    gap_s, now_s = small.payload_bytes / (0.9 * BYTES_PER_GBIT), 0.0
    for _ in range(60):
        begin(scheduler, small)
    while not huge.is_taken:
        assert now_s < 60.0
        now_s = run(scheduler, now_s, now_s + gap_s)
        begin(scheduler, small, now_s)


@pytest.mark.parametrize(("others", "ends_s"), [(5, 8.0), (60, 45.0)])
def test_a_huge_delivery_ends_even_if_small_ones_could_take_the_whole_link(
    others: int, ends_s: float
) -> None:
    """Whenever one of them ends, the next one comes: as many as admission lets in."""
    scheduler = a_scheduler("stall_dynamic", 1.0)
    huge = begin(scheduler, Demand(1 << 20, 0.01, 16))
    small, now_s = Demand(1 << 16, 0.002, 8), 0.0
    running = [begin(scheduler, small) for _ in range(others)]
    while not huge.is_taken:
        assert now_s < ends_s
        now_s = run(scheduler, now_s, now_s + 0.01)
        running = [begin(scheduler, small, now_s) if job.is_taken else job for job in running]


def test_many_deliveries_at_once_all_end_and_under_stall_dynamic_the_link_is_never_idle() -> None:
    for policy in POLICIES:
        scheduler = a_scheduler(policy, 1.0)
        jobs = [begin(scheduler, Demand(1 << 14, 0.001 * (n % 7 + 1), 8)) for n in range(400)]
        run(scheduler)
        assert_all_sent(*jobs)
        if policy == "stall_dynamic":
            total_bytes = sum(job.demand.payload_bytes for job in jobs)
            last_s = max(job.last_s for job in jobs)
            assert last_s == pytest.approx(total_bytes / BYTES_PER_GBIT, rel=0.01)
