"""What one decision of the scheduler costs with 1,000 deliveries.

Processor time of the thread, without garbage collection: what others do on the machine, and what is
left by all of a server, is not the decision's.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar, get_args

from benchmarks.basis.bench import Bench
from benchmarks.basis.measure import Row
from objectcache_schemas.operators.schedule import ScheduleConfiguration, TenantShare
from objectcache_schemas.policy_names import EVERY_EPOCH, FOR_LIFE, PolicyName, RatesName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.lanes.due_times import PLANNED_MAX
from objectcache_storage_server.scheduling.rates.policies import RATE_POLICIES, assigned_rates
from objectcache_storage_server.scheduling.scheduler import BYTES_PER_GBIT, Scheduler, Wait

GROUP = "Scheduling"
DELIVERIES = 1000
GRANTS = 20_000
QUICK_PART = 10  # of a quick run: one in so many
GOAL_US = 1000.0
CAP_GBPS = 1000.0
SEED = 1
CAPPED_TENANTS = 100
HARD_POLICIES: tuple[PolicyName, ...] = ("stall_dynamic", "calibrated_stall_opt")
ROUNDS = 50
TOKEN_LAYER_BYTES, LAYERS = 4096, 32
SHAPES = ((2048, 5.79), (8192, 29.87), (14336, 8.80), (28672, 23.85), (57344, 75.75))  # Table A8
HEAP_STEPS_S = 10e-6  # a few operations on heaps and dictionaries in Python

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Job:
    """A delivery without end, whose client always has room."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self._sent = 0

    def take(self) -> Fragment | None:
        length_bytes = self.demand.layer_bytes // 4
        layer = self._sent // 4 % LAYERS
        self._sent += 1
        return Fragment(self._sent * length_bytes, length_bytes, 0, 1, layer, layer + 1)

    def admitted(self, rate_bytes_per_s: float | None) -> None:
        pass


def _demands() -> list[Demand]:
    chooser = random.Random(SEED)
    demands = list[Demand]()
    for _ in range(DELIVERIES):
        tokens, window_ms = chooser.choice(SHAPES)
        window_s = window_ms / 1e3 * chooser.uniform(0.5, 2)
        demands.append(Demand(tokens * TOKEN_LAYER_BYTES, window_s, LAYERS))
    return demands


def measure_scheduling(bench: Bench) -> Iterator[Row]:
    """Rows for coming, going and the next fragment under each policy, and for rates anew."""
    demands = _demands()
    part = QUICK_PART if bench.scale.is_quick else 1
    grants, rounds = GRANTS // part, ROUNDS // part
    for policy in get_args(PolicyName):
        times = _quietly(_run, policy, demands, grants)
        for what, samples in times.seconds.items():
            yield _row(f"{policy}: {what}", samples)
    for name, times in _hard_cases(demands, grants, rounds):
        for what, samples in times.seconds.items():
            yield _row(f"{name}: {what}", samples)
    for policy in RATE_POLICIES:
        times = _Times()
        for _ in range(rounds):
            times.take("", assigned_rates, policy, demands, CAP_GBPS * BYTES_PER_GBIT)
        yield _row(f"{policy}: rates of {DELIVERIES:,}", times.seconds[""])


class _Times:
    """Seconds of each call, by what it was."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def take(
        self,
        what: str,
        call: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        begun_s = time.thread_time()
        result = call(*args, **kwargs)
        self.seconds.setdefault(what, []).append(time.thread_time() - begun_s)
        return result


def _hard_cases(demands: list[Demand], grants: int, rounds: int) -> Iterator[tuple[str, _Times]]:
    """What many flows, tenants or newcomers could make long."""
    for policy in HARD_POLICIES:
        for tenant_count in (1, CAPPED_TENANTS):
            name = f"{policy}, {tenant_count} capped tenants"
            yield name, _quietly(_run_capped, policy, demands, tenant_count, grants)
        yield f"{policy}, another cap", _quietly(_run_configure, policy, demands, rounds)
    for policy in RATE_POLICIES:
        yield f"{policy}, an epoch's end", _quietly(_run_epoch_ends, policy, demands, rounds)
    yield "an epoch's end, rates for life", _quietly(_run_epoch_ends_for_life, demands, rounds)
    yield "a plan", _quietly(_run_plans, demands, rounds)


def _quietly(
    case: Callable[Concatenate[_Times, Arguments], None],
    *args: Arguments.args,
    **kwargs: Arguments.kwargs,
) -> _Times:
    times = _Times()
    gc.collect()
    gc.disable()
    try:
        case(times, *args, **kwargs)
    finally:
        gc.enable()
    return times


def _run_capped(
    times: _Times, policy: PolicyName, demands: list[Demand], tenant_count: int, grants: int
) -> None:
    """Every flow's tenant has a cap, and the link has room: half of them in the pool."""
    tenants = {f"t{n}": TenantShare(cap_gbps=10.0 / tenant_count) for n in range(tenant_count)}
    scheduler = _scheduler(policy, CAP_GBPS, tenants)
    for number, demand in enumerate(demands):
        owned = replace(demand, tenant=f"t{number % tenant_count}")
        scheduler.add(_Job(owned), owned, 0.0, pooled=number % 2 == 0)
    _decide(times, scheduler, 0.0, grants // 4)


def _run_configure(times: _Times, policy: PolicyName, demands: list[Demand], rounds: int) -> None:
    scheduler = _scheduler(policy, CAP_GBPS, {})
    for number, demand in enumerate(demands):
        scheduler.add(_Job(demand), demand, 0.0, pooled=number % 4 > 0)
    now_s = _decide(_Times(), scheduler, 0.0, 2 * DELIVERIES)
    for number in range(rounds):
        configuration = _configuration(policy, CAP_GBPS - number % 2, {})
        times.take("configure", scheduler.configure, configuration, now_s)
        now_s = _decide(times, scheduler, now_s, DELIVERIES // 10)


def _run_epoch_ends(times: _Times, policy: PolicyName, demands: list[Demand], rounds: int) -> None:
    """All of the flows get other rates, because one goes and one comes."""
    scheduler = _scheduler(policy, CAP_GBPS, {})
    jobs = [_Job(demand) for demand in demands]
    for job in jobs:
        scheduler.add(job, job.demand, 0.0, pooled=True)
    now_s = _decide(_Times(), scheduler, 0.0, 2 * DELIVERIES)
    for number in range(rounds):
        job = jobs[number]
        scheduler.remove(job, now_s)
        scheduler.add(job, job.demand, now_s, pooled=True)
        now_s = _decide(times, scheduler, now_s + 0.011, DELIVERIES // 10)


def _run_epoch_ends_for_life(times: _Times, demands: list[Demand], rounds: int) -> None:
    """Half of the flows run at a rate for life; the others find no room, and come again."""
    scheduler = _scheduler("calibrated_stall_opt", CAP_GBPS, {}, FOR_LIFE)
    half = len(demands) // 2
    for demand in demands[:half]:
        scheduler.add(_Job(demand), demand, 0.0, pooled=True)
    now_s = _decide(_Times(), scheduler, 0.0, 2 * DELIVERIES)
    waiting = [_Job(demand) for demand in demands[half:]]
    for job in waiting:
        scheduler.add(job, job.demand, now_s, pooled=True)
    for number in range(rounds):
        now_s = _decide(times, scheduler, now_s + 0.011, DELIVERIES // 10)
        job = waiting[number]
        scheduler.remove(job, now_s)
        scheduler.add(job, job.demand, now_s, pooled=True)


def _run_plans(times: _Times, demands: list[Demand], rounds: int) -> None:
    """As many as a plan is made for, one of which goes and comes."""
    scheduler = _scheduler("stall_dynamic", 50.0, {})
    jobs = [_Job(demand) for demand in demands[:PLANNED_MAX]]
    for job in jobs:
        scheduler.add(job, job.demand, 0.0, pooled=True)
    now_s = 0.0
    for number in range(rounds):
        now_s = _decide(times, scheduler, now_s, 10)
        job = jobs[number % len(jobs)]
        scheduler.remove(job, now_s)
        scheduler.add(job, job.demand, now_s, pooled=True)


def _decide(times: _Times, scheduler: Scheduler[_Job], now_s: float, count: int) -> float:
    for _ in range(count):
        step = times.take("next", scheduler.next, now_s)
        if isinstance(step, Wait):
            if step.until_s == math.inf:
                break
            now_s = max(now_s, step.until_s)
    return now_s


def _configuration(
    policy: PolicyName,
    cap_gbps: float,
    tenants: dict[str, TenantShare],
    rates: RatesName = EVERY_EPOCH,
) -> ScheduleConfiguration:
    return ScheduleConfiguration(
        policy=policy,
        cap_gbps=cap_gbps,
        margin_gbps=5.0,
        epoch_s=0.01,
        rates=rates,
        layerwise_threshold_bytes=0,
        tenants=tenants,
    )


def _scheduler(
    policy: PolicyName,
    cap_gbps: float,
    tenants: dict[str, TenantShare],
    rates: RatesName = EVERY_EPOCH,
) -> Scheduler[_Job]:
    return Scheduler(_configuration(policy, cap_gbps, tenants, rates), 0.0)


def _run(times: _Times, policy: PolicyName, demands: list[Demand], grants: int) -> None:
    scheduler = _scheduler(policy, CAP_GBPS, {})
    jobs, now_s = [_Job(demand) for demand in demands], 0.0
    for job in jobs:
        times.take("add", scheduler.add, job, job.demand, 0.0, pooled=True)
    for number in range(grants):
        step = times.take("next", scheduler.next, now_s)
        if isinstance(step, Wait):
            assert step.until_s < math.inf
            now_s = max(now_s, step.until_s)
        if number % 20 == 0:  # one goes and one comes
            job = jobs[number // 20 % len(jobs)]
            times.take("remove", scheduler.remove, job, now_s)
            times.take("add", scheduler.add, job, job.demand, now_s, pooled=True)


def _row(name: str, seconds: list[float]) -> Row:
    samples = tuple(1e6 * second for second in seconds)
    return Row(
        group=GROUP,
        name=f"{name}, {DELIVERIES:,} deliveries" if "rates" not in name else name,
        unit="us",
        samples=samples,
        ratio=max(samples) / GOAL_US,
        ratio_of=f"the slowest, to {GOAL_US:g} us",
        goal="at most 1",
        by_hand=f"a few steps of heaps: {1e6 * HEAP_STEPS_S:g} us",
    )
