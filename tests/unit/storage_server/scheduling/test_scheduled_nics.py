"""Deliveries to several storage NICs: a slow one holds up nobody else, and each is kept to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_schemas.operators.schedule import TenantShare
from objectcache_schemas.policy_names import FOR_LIFE, RATES, PolicyName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.due_part import DueLine, DuePart
from objectcache_storage_server.scheduling.lanes.due_times import PLANNED_MAX
from objectcache_storage_server.scheduling.lanes.nic_paces import NICS_OF_TENANT_MAX
from objectcache_storage_server.scheduling.scheduler import (
    BYTES_PER_GBIT,
    LINK_CATCH_UP_S,
    NIC_CATCH_UP_S,
    Scheduler,
    Wait,
)
from tests.scheduled_jobs import Job, bytes_by_time, run
from tests.schedules import a_configuration
from tests.unit.examples import examples

MB = 1_000_000
CAP_GBPS = 0.8  # 100 MB/s
SLOW, FAST = "slow", "fast"
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def a_job(nic: str = "", layers: int = 16, tenant: str = "t", window_s: float = 0.001) -> Job:
    return Job(Demand(MB, window_s, layers, tenant=tenant, nic=nic), MB // 16)


def add(
    scheduler: Scheduler[Job],
    jobs: Sequence[Job],
    rate: float | None = None,
    *,
    pooled: bool = True,
) -> None:
    for job in jobs:
        scheduler.add(job, job.demand, 0.0, pooled=pooled, nic_bytes_per_s=rate)


def together_bytes_per_s(jobs: Sequence[Job]) -> float:
    """From the first fragment to the last one."""
    sent = bytes_by_time(jobs)
    return sum(length for _, length in sent[:-1]) / (sent[-1][0] - sent[0][0])


def most_above(jobs: Sequence[Job], rate: float) -> float:
    """Seconds by which what was sent ran ahead of a clock of that rate."""
    next_at_s, most_s = -math.inf, 0.0
    for at_s, length in bytes_by_time(jobs):
        most_s = max(most_s, next_at_s - at_s)
        next_at_s = max(next_at_s, at_s) + length / rate
    return most_s


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_slow_nic_holds_up_nobody_else_and_is_kept_to(
    policy: PolicyName, pooled: bool, rates: str
) -> None:
    """Beside a NIC of 5 MB/s, the others have the 95 MB/s that it leaves of the link."""
    configuration = a_configuration(policy, CAP_GBPS, rates=rates)  # type: ignore[arg-type]
    scheduler: Scheduler[Job] = Scheduler(configuration, 0.0)
    slow, fast = [a_job(SLOW, 1) for _ in range(3)], [a_job(FAST, 64) for _ in range(3)]
    add(scheduler, slow, 5.0 * MB, pooled=pooled)
    add(scheduler, fast, 1000.0 * MB, pooled=pooled)
    run(scheduler)
    assert most_above(slow, 5.0 * MB) <= NIC_CATCH_UP_S + 1e-9
    if pooled and policy not in ("equal", "stall_dynamic"):
        return  # each gets its share by its bytes or its window, whatever a NIC carries
    assert together_bytes_per_s(slow) >= 0.95 * 5.0 * MB
    if pooled and rates == FOR_LIFE and policy == "equal":
        return  # who came first lives with what it got
    before_s = min(slow[0].last_s, fast[0].last_s)
    sent = sum(length for at_s, length in bytes_by_time(fast) if at_s < before_s)
    assert sent / before_s >= 0.95 * 95.0 * MB


@pytest.mark.parametrize("policy", POLICIES)
def test_another_tenants_use_of_the_name_slows_nobody(policy: PolicyName) -> None:
    scheduler: Scheduler[Job] = Scheduler(a_configuration(policy, CAP_GBPS), 0.0)
    theirs, mine = [a_job(SLOW, 1, tenant="b")], [a_job(SLOW, 32, tenant="a")]
    add(scheduler, mine, 1000.0 * MB)
    add(scheduler, theirs, 1.0 * MB)
    run(scheduler, until_s=0.2)
    sent = sum(length for _, length in bytes_by_time(mine))
    assert sent >= 5 * sum(length for _, length in bytes_by_time(theirs))
    assert most_above(theirs, 1.0 * MB) <= NIC_CATCH_UP_S + 1e-9


def test_the_newest_rate_of_a_nic_holds_for_all_that_go_to_it() -> None:
    scheduler: Scheduler[Job] = Scheduler(a_configuration(cap_gbps=CAP_GBPS), 0.0)
    first, second = a_job(SLOW, 32), a_job(SLOW, 32)
    add(scheduler, [first], 5.0 * MB)
    run(scheduler, until_s=0.5)
    before = first.taken_bytes
    assert before == pytest.approx(2.5 * MB, rel=0.1)
    scheduler.add(second, second.demand, 0.5, pooled=True, nic_bytes_per_s=50.0 * MB)
    run(scheduler, 0.5, until_s=1.0)
    assert first.taken_bytes + second.taken_bytes - before == pytest.approx(25 * MB, rel=0.1)


@pytest.mark.parametrize("policy", POLICIES)
def test_neither_the_pool_nor_fair_turns_have_all_of_a_slow_nic(policy: PolicyName) -> None:
    """Though the rest of the pool sends a lot elsewhere, and so is far ahead of its share."""
    scheduler: Scheduler[Job] = Scheduler(a_configuration(policy, CAP_GBPS), 0.0)
    pooled, fair = [a_job(SLOW, 64)], [a_job(SLOW, 64)]
    add(scheduler, pooled, 5.0 * MB)
    add(scheduler, fair, 5.0 * MB, pooled=False)
    add(scheduler, [a_job(FAST, 512) for _ in range(4)], 1000.0 * MB)
    run(scheduler, until_s=4.0)
    for side in (pooled, fair):
        assert sum(job.taken_bytes for job in side) >= 0.9 * 4.0 * 2.5 * MB


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "stall_dynamic"])
def test_rates_of_what_goes_to_a_nic_add_up_to_no_more_than_it_carries(
    policy: PolicyName, rates: str
) -> None:
    configuration = a_configuration(policy, CAP_GBPS, rates=rates)  # type: ignore[arg-type]
    scheduler: Scheduler[Job] = Scheduler(configuration, 0.0)
    slow, others = [a_job(SLOW) for _ in range(3)], [a_job() for _ in range(3)]
    add(scheduler, slow, 6.0 * MB)
    add(scheduler, others)
    run(scheduler, until_s=0.05)
    given_rates = [flow.rate_bytes_per_s or 0.0 for flow in scheduler.flows() if flow.demand.nic]
    assert 0.99 * 6.0 * MB <= sum(given_rates) <= 6.0 * MB * (1 + 1e-9)
    free = [flow.rate_bytes_per_s or 0.0 for flow in scheduler.flows() if not flow.demand.nic]
    if policy in ("equal", "kv_prop"):
        assert sum(free) == pytest.approx(94.0 * MB, rel=0.01)


@pytest.mark.parametrize("count", [3, PLANNED_MAX, PLANNED_MAX + 4])
def test_nics_that_the_cap_does_not_bind_are_planned_as_if_each_were_alone(count: int) -> None:
    """Also where all together are more than a plan is made for."""
    jobs = {
        nic: [a_job(nic, 4 + number, window_s=0.002 * number) for number in range(1, count)]
        for nic in (SLOW, FAST)
    }
    rates = {SLOW: 5.0 * MB, FAST: 20.0 * MB}
    scheduler: Scheduler[Job] = Scheduler(a_configuration(cap_gbps=CAP_GBPS), 0.0)
    for nic, them in jobs.items():
        add(scheduler, them, rates[nic])
    run(scheduler)
    for nic, them in jobs.items():
        link_gbps = rates[nic] / BYTES_PER_GBIT
        alone: Scheduler[Job] = Scheduler(a_configuration(cap_gbps=link_gbps), 0.0)
        again = [
            Job(Demand(MB, one.demand.compute_window_s, one.demand.num_layers), MB // 16)
            for one in them
        ]
        add(alone, again)
        run(alone)
        ttfts = [sum(job.ttft_s(0.0, rates[nic]) for job in group) for group in (them, again)]
        assert ttfts[0] == pytest.approx(ttfts[1], rel=0.05)


def test_a_tenants_cap_and_a_slow_nic_hold_together() -> None:
    tenants = {"t": TenantShare(cap_gbps=0.08)}  # 10 MB/s
    scheduler: Scheduler[Job] = Scheduler(a_configuration(cap_gbps=CAP_GBPS, tenants=tenants), 0.0)
    slow, fast = [a_job(SLOW, 8) for _ in range(4)], [a_job(FAST, 8) for _ in range(4)]
    add(scheduler, slow, 2.0 * MB)
    add(scheduler, fast, 50.0 * MB)
    run(scheduler)
    assert most_above(slow, 2.0 * MB) <= NIC_CATCH_UP_S + 1e-9
    assert most_above([*slow, *fast], 10.0 * MB) <= LINK_CATCH_UP_S + 1e-9
    assert all(job.is_taken for job in (*slow, *fast))


def test_a_change_of_policy_keeps_what_is_known_of_nics() -> None:
    scheduler: Scheduler[Job] = Scheduler(a_configuration("stall_dynamic", CAP_GBPS), 0.0)
    slow = [a_job(SLOW, 4) for _ in range(2)]
    add(scheduler, slow, 5.0 * MB)
    now_s = 0.0
    for policy in ("equal", "stall_opt", "stall_dynamic"):
        now_s = run(scheduler, now_s, until_s=now_s + 0.2)
        scheduler.configure(a_configuration(policy, CAP_GBPS), now_s)
    run(scheduler, now_s)
    assert all(job.is_taken for job in slow)
    assert most_above(slow, 5.0 * MB) <= 3 * NIC_CATCH_UP_S
    (nic,) = scheduler.nics.known()
    assert (nic.deliveries, nic.sent_bytes) == (0, 8 * MB)


@settings(max_examples=examples(30), deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    cap_gbps=st.sampled_from([0.0, 0.08, CAP_GBPS]),
    jobs=st.lists(
        st.tuples(
            st.sampled_from(["", SLOW, FAST]),
            st.sampled_from(["a", "b"]),
            st.integers(1, 4),
            st.booleans(),
            st.none() | st.sampled_from([10.0 * MB, 30.0 * MB]),
            st.sampled_from([0.0, 0.03]),
        ),
        max_size=14,
    ),
)
def test_whatever_goes_to_nics_is_sent_whole(
    policy: PolicyName,
    cap_gbps: float,
    jobs: list[tuple[str, str, int, bool, float | None, float]],
) -> None:
    scheduler: Scheduler[Job] = Scheduler(a_configuration(policy, cap_gbps), 0.0)
    made, now_s = list[Job](), 0.0
    for nic, tenant, layers, pooled, rate, at_s in sorted(jobs, key=lambda job: job[-1]):
        job = a_job(nic, layers, tenant)
        made.append(job)
        if at_s > now_s:
            now_s = run(scheduler, now_s, until_s=at_s)
        scheduler.add(job, job.demand, at_s, pooled=pooled, nic_bytes_per_s=rate if nic else None)
    run(scheduler, now_s)
    assert all(job.is_taken for job in made)
    assert not scheduler.flows()
    assert all(not nic.deliveries for nic in scheduler.nics.known())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_that_names_too_many_nics_has_the_rest_unpaced(policy: PolicyName) -> None:
    """Another tenant may still name its own; who ends leaves its place to the next."""
    scheduler: Scheduler[Job] = Scheduler(a_configuration(policy, CAP_GBPS), 0.0)
    jobs = [a_job(f"nic{number}", 1) for number in range(NICS_OF_TENANT_MAX)]
    add(scheduler, jobs, 5.0 * MB)
    beyond, known, theirs = a_job("beyond", 1), a_job("nic0", 1), a_job("beyond", 1, "other")
    add(scheduler, [beyond, known, theirs], 5.0 * MB)
    flows = [scheduler.flow(job) for job in (beyond, known, theirs)]
    named = [flow.demand.nic for flow in flows if flow is not None]
    assert named == ["", "nic0", "beyond"]
    assert len(scheduler.nics.known()) == NICS_OF_TENANT_MAX + 1
    assert scheduler.nics.beyond_count == 1
    scheduler.remove(jobs[1], 0.0)
    after = a_job("beyond", 1)
    add(scheduler, [after], 5.0 * MB)
    assert (flow := scheduler.flow(after)) is not None
    assert flow.demand.nic == "beyond"
    assert scheduler.nics.beyond_count == 1
    run(scheduler)
    assert all(job.is_taken for job in (*jobs, beyond, known, theirs, after) if job is not jobs[1])


@pytest.mark.parametrize("cap_gbps", [0.0, CAP_GBPS, 100.0])
def test_a_decision_looks_at_no_more_lines_and_parts_with_many_nics_than_with_some(
    cap_gbps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0

    def counting(looked: Callable[..., object]) -> Callable[..., object]:
        def count(*arguments: object) -> object:
            nonlocal looked_at
            looked_at += 1
            return looked(*arguments)

        return count

    monkeypatch.setattr(DueLine, "first", counting(DueLine.first))
    monkeypatch.setattr(DuePart, "prepare", counting(DuePart.prepare))
    ranked = DuePart._rank_by_rule  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(DuePart, "_rank_by_rule", counting(ranked))
    found: list[float] = []
    for nics in (16, 96):
        scheduler: Scheduler[Job] = Scheduler(a_configuration(cap_gbps=cap_gbps), 0.0)
        jobs = [a_job(f"nic{number % nics}") for number in range(96)]
        add(scheduler, jobs, 50.0 * MB)
        looked_at, decisions, now_s = 0, 0, 0.0
        while sum(len(job.sent) for job in jobs) < 400:
            step = scheduler.next(now_s)
            decisions += 1
            if isinstance(step, Wait):
                now_s = max(now_s, step.until_s)
            else:
                step.job.sent.append((now_s, step.fragment))
        found.append(looked_at / decisions)
    assert found[1] <= 2 * found[0] + 8, found
