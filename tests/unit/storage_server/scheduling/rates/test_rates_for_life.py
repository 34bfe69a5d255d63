"""Rates for life, under virtual time: who is admitted when, and who may go before whom."""

from __future__ import annotations

import pytest

from objectcache_schemas.operators.schedule import TenantShare
from objectcache_schemas.policy_names import PolicyName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.rates import policies, rated_pool
from objectcache_storage_server.scheduling.rates.assign_at_epochs import STARTED_MAX
from objectcache_storage_server.scheduling.rates.divide_for_life import OVERTAKEN_S
from objectcache_storage_server.scheduling.scheduler import BYTES_PER_GBIT, Scheduler
from tests.scheduled_jobs import Job, run
from tests.schedules import a_configuration

EPOCH_S = 0.01
GBPS = BYTES_PER_GBIT
CAPPED: tuple[PolicyName, ...] = ("equal", "stall_opt", "calibrated_stall_opt")


def a_scheduler(policy: PolicyName, cap_gbps: float, **tenants: TenantShare) -> Scheduler[Job]:
    configuration = a_configuration(
        policy, cap_gbps, margin_gbps=0.05, epoch_s=EPOCH_S, rates="for_life", tenants=tenants
    )
    return Scheduler(configuration, 0.0)


def begin(scheduler: Scheduler[Job], demand: Demand, now_s: float) -> Job:
    job = Job(demand, int(min(scheduler.fragment_bytes_max(), demand.layer_bytes, 1 << 20)))
    scheduler.add(job, demand, now_s, pooled=True)
    return job


def needing(gbps: float, num_layers: int, tenant: str = "", window_s: float = 0.01) -> Demand:
    """A delivery whose zero-stall rate is that."""
    return Demand(int(gbps * GBPS * window_s), window_s, num_layers, tenant=tenant)


# --- tenants' caps ---


@pytest.mark.parametrize("policy", CAPPED)
def test_staggered_deliveries_of_a_capped_tenant_achieve_what_each_was_told(
    policy: PolicyName,
) -> None:
    scheduler = a_scheduler(policy, 10.0, small=TenantShare(cap_gbps=1.0))
    jobs, now_s = list[Job](), 0.0
    for number in range(5):
        now_s = run(scheduler, now_s, 0.05 * number)
        jobs.append(begin(scheduler, Demand(1 << 20, 0.004, 16, tenant="small"), now_s))
    run(scheduler, now_s)
    for job in jobs:
        (told,) = job.rates
        assert told is not None
        assert job.achieved_bytes_per_s == pytest.approx(told, rel=0.03)


def test_a_capped_tenants_many_deliveries_promise_it_no_more_than_its_cap() -> None:
    scheduler = a_scheduler("equal", 10.0, small=TenantShare(cap_gbps=1.0))
    now_s, small = 0.0, list[Job]()
    for _ in range(12):
        small.append(begin(scheduler, Demand(1 << 20, 0.004, 400, tenant="small"), now_s))
        now_s = run(scheduler, now_s, now_s + 0.05)
    told = [rate for job in small for rate in job.rates if rate is not None]
    assert sum(told) <= GBPS * (1 + 1e-9)
    other = begin(scheduler, Demand(1 << 20, 0.004, 64, tenant="other"), now_s)
    run(scheduler, now_s, now_s + 2 * EPOCH_S)
    assert other.rates == [pytest.approx(9 * GBPS)]


# --- who fits ---


def test_those_who_fit_are_admitted_before_one_that_does_not() -> None:
    scheduler = a_scheduler("stall_opt", 10.0)
    begin(scheduler, needing(8.0, 4000, "r"), 0.0)
    now_s = run(scheduler, 0.0, 0.05)
    large = begin(scheduler, needing(20.0, 32, "h"), now_s)
    small = [begin(scheduler, needing(0.1, 32, f"s{n}"), now_s) for n in range(5)]
    run(scheduler, now_s, now_s + 0.1)
    assert large.rates == []
    assert [job.rates for job in small] == [[pytest.approx(0.1 * GBPS)]] * 5


def test_nobody_waits_for_ever_behind_a_stream_of_small_ones() -> None:
    """The stream takes nine tenths of the link: one comes every 10 ms."""
    scheduler = a_scheduler("stall_opt", 10.0)
    now_s = 0.0
    for _ in range(40):
        begin(scheduler, needing(0.4, 23, "stream"), now_s)
        now_s = run(scheduler, now_s, now_s + 0.01)
    large = begin(scheduler, needing(9.9, 8, "large", window_s=0.1), now_s)
    until_s = now_s + OVERTAKEN_S + 1.0
    while not large.rates:
        assert now_s < until_s
        begin(scheduler, needing(0.4, 23, "stream"), now_s)
        now_s = run(scheduler, now_s, now_s + 0.01)
    assert now_s >= until_s - 1.0


def test_who_waits_for_its_tenants_cap_holds_up_nobody_else() -> None:
    scheduler = a_scheduler("stall_opt", 10.0, small=TenantShare(cap_gbps=1.0))
    begin(scheduler, needing(0.8, 400, "small"), 0.0)
    now_s = run(scheduler, 0.0, 0.05)
    held = begin(scheduler, needing(0.9, 4, "small"), now_s)
    now_s = run(scheduler, now_s, now_s + 2 * OVERTAKEN_S)
    assert held.rates == []
    later = begin(scheduler, needing(0.1, 32, "small"), now_s)
    others = [begin(scheduler, needing(1.0, 32, f"o{n}"), now_s) for n in range(3)]
    run(scheduler, now_s, now_s + 0.2)
    assert [job.rates for job in others] == [[pytest.approx(GBPS)]] * 3
    assert held.rates == later.rates == []  # it is not overtaken within its tenant


def test_an_old_one_that_fits_without_those_behind_it_is_admitted() -> None:
    scheduler = a_scheduler("stall_opt", 10.0)
    begin(scheduler, needing(8.0, 4000, "r"), 0.0)
    now_s = run(scheduler, 0.0, 0.05)
    old = begin(scheduler, needing(8.0, 8, "old"), now_s)
    now_s = run(scheduler, now_s, now_s + 2 * OVERTAKEN_S)
    assert old.rates == []
    behind = [begin(scheduler, needing(4.0, 32, f"b{n}"), now_s) for n in range(10)]
    run(scheduler, now_s, now_s + 0.02)
    assert len(old.rates) == 1
    assert 0 < sum(bool(job.rates) for job in behind) < len(behind)


# --- steps ---


def test_no_decision_computes_rates_twice_and_many_are_assigned_anew_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed = 0
    assigned_rates = policies.assigned_rates

    def counted(*args: object, **kwargs: object) -> list[float]:
        nonlocal computed
        computed += 1
        return assigned_rates(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(rated_pool, "assigned_rates", counted)
    scheduler = a_scheduler("equal", 10.0)
    jobs = [begin(scheduler, needing(0.1, 400), 0.0) for _ in range(100)]
    for now_s in (0.0, *[EPOCH_S + step / 1e5 for step in range(100)]):
        computed = 0
        scheduler.next(now_s)
        assert computed <= 1
    assert all(len(job.rates) == 1 for job in jobs)
    scheduler.configure(a_configuration("equal", 20.0, epoch_s=EPOCH_S, rates="for_life"), 0.02)
    while not all(len(job.rates) == 2 for job in jobs):
        before, computed = sum(len(job.rates) for job in jobs), 0
        scheduler.next(0.02)
        assert sum(len(job.rates) for job in jobs) - before <= STARTED_MAX
        assert computed <= 1
    assert [job.rates[1:] for job in jobs] == [[pytest.approx(0.2 * GBPS)]] * 100
