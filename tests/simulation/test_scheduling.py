"""Deliveries come, go, sleep and wake, and the schedule is changed under them, at random."""

from __future__ import annotations

import math
from collections import Counter
from typing import get_args

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from objectcache_schemas.operators.schedule import TenantShare
from objectcache_schemas.policy_names import EVERY_EPOCH, PolicyName, RatesName
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.pace_link import Pace
from objectcache_storage_server.scheduling.scheduler import (
    BYTES_PER_GBIT,
    LINK_CATCH_UP_S,
    Scheduler,
    Wait,
)
from tests.scheduled_jobs import Job, run
from tests.schedules import a_configuration
from tests.unit.examples import examples

TENANTS = ("a", "b", "c")
NICS = {"slow": 1e5, "fast": 1e8, "unknown": None}  # bytes per second, as clients say
LAYER_BYTES_MAX = 1 << 20
DRAIN_S = 10_000.0

policies: st.SearchStrategy[PolicyName] = st.sampled_from(get_args(PolicyName))
caps_gbps = st.sampled_from([0.0, 0.01, 0.1, 1.0, 40.0])
demands = st.builds(
    Demand,
    layer_bytes=st.integers(1, LAYER_BYTES_MAX),
    compute_window_s=st.none() | st.floats(0.0, 0.1),
    num_layers=st.integers(1, 6),
    tenant=st.sampled_from(TENANTS),
    nic=st.sampled_from(["", *NICS]),
)
shares = st.builds(
    TenantShare,
    weight=st.sampled_from([0.1, 1.0, 7.0]),
    cap_gbps=st.sampled_from([0.0, 0.01, 0.5]),
)


class Schedules(RuleBasedStateMachine):
    """What holds at any time: every fragment in order and once, the cap, and progress;
    to whichever NICs deliveries go.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.scheduler: Scheduler[Job] = Scheduler(a_configuration(), 0.0)
        self.jobs: list[Job] = []
        self.judge = Pace(math.inf, 0.0, 0.0)

    @initialize(policy=policies, cap_gbps=caps_gbps)
    def begin(self, policy: PolicyName, cap_gbps: float) -> None:
        self.configure(policy, cap_gbps, 5.0, 0.01, EVERY_EPOCH, {})

    @rule(
        policy=policies,
        cap_gbps=caps_gbps,
        margin_gbps=st.sampled_from([0.0, 0.05, 5.0]),
        epoch_s=st.sampled_from([0.001, 0.01, 1.0]),
        rates=st.sampled_from(get_args(RatesName)),
        tenants=st.dictionaries(st.sampled_from(TENANTS), shares),
    )
    def configure(
        self,
        policy: PolicyName,
        cap_gbps: float,
        margin_gbps: float,
        epoch_s: float,
        rates: RatesName,
        tenants: dict[str, TenantShare],
    ) -> None:
        configuration = a_configuration(
            policy,
            cap_gbps,
            margin_gbps=margin_gbps,
            epoch_s=epoch_s,
            rates=rates,
            tenants=tenants,
        )
        self.scheduler.configure(configuration, self.now_s)
        self.judge = Pace(cap_gbps * BYTES_PER_GBIT or math.inf, 0.0, self.now_s)

    @rule(
        demand=demands,
        pooled=st.booleans(),
        pieces=st.integers(1, 5),
        room=st.sampled_from([0, 1, 3, math.inf]),
        rate_max=st.sampled_from([1e6, math.inf]),
    )
    def add(self, demand: Demand, pooled: bool, pieces: int, room: float, rate_max: float) -> None:
        job = Job(demand, math.ceil(demand.layer_bytes / pieces), room)
        pooled = pooled and demand.compute_window_s is not None
        self.scheduler.add(
            job,
            demand,
            self.now_s,
            pooled=pooled,
            rate_max=rate_max,
            nic_bytes_per_s=NICS.get(demand.nic),
        )
        self.jobs.append(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        self.scheduler.remove(job, self.now_s)
        self.jobs.remove(job)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), room=st.integers(0, 4))
    def wake(self, data: st.DataObject, room: int) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        job.room += room
        self.scheduler.wake(job, self.now_s)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), layers=st.integers(0, 7))
    def consume(self, data: st.DataObject, layers: int) -> None:
        self.scheduler.consumed(data.draw(st.sampled_from(self.jobs)), layers, self.now_s)

    @rule(grants=st.integers(1, 30), late_s=st.sampled_from([0.0, 0.001, 0.3]))
    def carry_out(self, grants: int, late_s: float) -> None:
        """As a dispatcher does, whose threads wake late."""
        for _ in range(grants):
            step = self.scheduler.next(self.now_s)
            if isinstance(step, Wait):
                if step.until_s == math.inf:
                    return
                self.now_s = max(self.now_s, step.until_s) + late_s
                continue
            assert step.job in self.jobs, "a fragment of a delivery that is gone"
            self._check_pace(step.fragment.length_bytes)
            step.job.sent.append((self.now_s, step.fragment))
            if step.job.is_taken:
                self.scheduler.remove(step.job, self.now_s)
                self.jobs.remove(step.job)

    def _check_pace(self, length_bytes: int) -> None:
        """Nothing goes before what went has passed, but for the catching up."""
        ahead_s = self.judge.next_at_s - self.now_s
        assert ahead_s <= LINK_CATCH_UP_S + 1e-9
        self.judge.charge(length_bytes, self.now_s)

    @invariant()
    def every_nic_counts_its_deliveries(self) -> None:
        going = Counter((job.demand.tenant, job.demand.nic) for job in self.jobs if job.demand.nic)
        known = {nic.destination: nic.deliveries for nic in self.scheduler.nics.known()}
        assert {destination: count for destination, count in known.items() if count} == going

    @invariant()
    def every_fragment_went_once_and_in_order(self) -> None:
        for job in self.jobs:
            sent = [fragment for _, fragment in job.sent]
            ends = [fragment.offset_bytes + fragment.length_bytes for fragment in sent]
            assert [fragment.offset_bytes for fragment in sent] == [0, *ends][: len(sent)]
            assert job.taken_bytes == (ends[-1] if ends else 0)

    def teardown(self) -> None:
        """Everybody gets room, and then everybody ends."""
        left = list(self.jobs)
        for job in left:
            job.room = math.inf
            self.scheduler.wake(job, self.now_s)
        run(self.scheduler, self.now_s, self.now_s + DRAIN_S)
        for job in left:
            assert job.is_taken, f"{job} is left behind by {self.scheduler!r}"
        assert self.scheduler.flows() == []


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=examples(50), stateful_step_count=40, deadline=None)
