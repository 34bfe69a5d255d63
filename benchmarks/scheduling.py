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
from typing import ParamSpec, TypeVar, get_args

from benchmarks.bench import Bench
from benchmarks.measure import Row
from objectcache_schemas.schedule import PolicyName, ScheduleConfiguration
from objectcache_storage_server.plan import Fragment
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.policies import RATE_POLICIES, assigned_rates
from objectcache_storage_server.scheduling.scheduler import BYTES_PER_GBIT, Scheduler, Wait

GROUP = "Scheduling"
DELIVERIES = 1000
GRANTS = 20_000
GOAL_US = 1000.0
CAP_GBPS = 1000.0
SEED = 1
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
    for policy in get_args(PolicyName):
        times = _Times()
        gc.collect()
        gc.disable()
        try:
            _run(policy, demands, times)
        finally:
            gc.enable()
        for what, samples in times.seconds.items():
            yield _row(f"{policy}: {what}", samples)
    for policy in RATE_POLICIES:
        times = _Times()
        for _ in range(ROUNDS):
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


def _run(policy: PolicyName, demands: list[Demand], times: _Times) -> None:
    scheduler: Scheduler[_Job] = Scheduler(
        ScheduleConfiguration(
            policy=policy,
            cap_gbps=CAP_GBPS,
            margin_gbps=5.0,
            epoch_s=0.01,
            layerwise_threshold_bytes=0,
        ),
        0.0,
    )
    jobs, now_s = [_Job(demand) for demand in demands], 0.0
    for job in jobs:
        times.take("add", scheduler.add, job, job.demand, 0.0, pooled=True)
    for number in range(GRANTS):
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
