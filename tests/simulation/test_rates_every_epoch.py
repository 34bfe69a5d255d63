"""What holds at any time while rates are worked out again at every epoch, and what that is for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_runtime.settings import Settings
from objectcache_schemas.operators.schedule import TenantShare
from objectcache_schemas.policy_names import EVERY_EPOCH, FOR_LIFE, PolicyName, RatesName
from objectcache_storage_server.admission.delivery_turns import AdmissionLimits
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.rates.policies import RATE_POLICIES
from objectcache_storage_server.scheduling.scheduler import BYTES_PER_GBIT, Scheduler, Wait
from objectcache_storage_server.simulation.arrivals import Arrival
from objectcache_storage_server.simulation.machine import Machine
from objectcache_storage_server.simulation.mix import poisson_arrivals, rate_for, read_mix
from objectcache_storage_server.simulation.run import (
    FRAGMENT_S,
    Outcome,
    SimulatedSchedule,
    simulate,
)
from tests.scheduled_jobs import Job
from tests.schedules import a_configuration
from tests.unit.examples import examples
from tests.unit.storage_server.scheduling.paper_tables import COMPUTE_WINDOWS, MARGIN_GBPS

EPOCH_S = 0.01
CAP_GBPS = 1.0
CAP = CAP_GBPS * BYTES_PER_GBIT
TENANTS = ("a", "b", "c")
WORK_CONSERVING = ("equal", "kv_prop", "bw_prop")
ROUNDING = 1 + 1e-9

# --- two that come one after the other ---

LARGE, SMALL = COMPUTE_WINDOWS["64K, 87.5%"], COMPUTE_WINDOWS["16K, 50%"]
STAGGER_S = 0.5


def staggered(policy: PolicyName, rates: RatesName, queue_timeout_s: float) -> Outcome:
    """A large request, and half a second later a small one, on a link of 5 Gbps."""
    arrivals = [
        Arrival(at_s, tokens, window_ms / 1e3)
        for at_s, (tokens, window_ms) in ((0.0, LARGE), (STAGGER_S, SMALL))
    ]
    limits = AdmissionLimits(256, 256, 64, queue_timeout_s)
    schedule = SimulatedSchedule(policy, MARGIN_GBPS, EPOCH_S, limits, rates=rates)
    return simulate(arrivals, Machine(5 * BYTES_PER_GBIT), schedule)


def first_tokens_s(outcome: Outcome) -> dict[int, float]:
    """By cached tokens."""
    return {
        client.arrival.cached_tokens: client.arrival.at_s + client.ttft_s
        for client in outcome.clients
    }


def test_a_small_request_that_comes_later_shares_the_link_instead_of_waiting_for_its_end() -> None:
    large, small = LARGE[0], SMALL[0]
    for_life = first_tokens_s(staggered("equal", FOR_LIFE, 60.0))
    assert for_life[small] > for_life[large] > 12.0
    shared = first_tokens_s(staggered("equal", EVERY_EPOCH, 60.0))
    half = 5 * BYTES_PER_GBIT / 2
    payload_bytes = small * 4096 * 32
    assert shared[small] == pytest.approx(STAGGER_S + payload_bytes / half, abs=0.1)
    assert shared[large] == pytest.approx(for_life[small], rel=0.01)  # nothing was left unused


@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_with_the_default_timeout_the_later_one_is_refused_only_for_life(
    policy: PolicyName,
) -> None:
    timeout_s = Settings().scheduler.queue_timeout_s
    assert len(staggered(policy, FOR_LIFE, timeout_s).refused) == 1
    assert staggered(policy, EVERY_EPOCH, timeout_s).refused == []


# --- nobody is refused ---


def at_seventy_percent(seed: int) -> tuple[list[Arrival], Machine]:
    mix, link = read_mix(None), Machine(50 * BYTES_PER_GBIT)
    rate_per_s = rate_for(mix, 0.7, link.alone_bytes_per_s / link.token_bytes)
    return poisson_arrivals(mix, 400, rate_per_s, seed), link


@pytest.mark.parametrize("seed", range(examples(1)))
@pytest.mark.parametrize("policy", RATE_POLICIES)
def test_at_seventy_percent_of_the_link_nobody_waits_longer_than_an_epoch_for_a_rate(
    policy: PolicyName, seed: int
) -> None:
    """Whoever waits longer, by a fragment on the link, is refused here."""
    arrivals, link = at_seventy_percent(seed)
    of_settings = Settings()
    limits = AdmissionLimits(
        deliveries_max=of_settings.storage.deliveries_max,
        tenant_deliveries_max=of_settings.scheduler.tenant_deliveries_max,
        queue_max=of_settings.scheduler.queue_max,
        queue_timeout_s=EPOCH_S + FRAGMENT_S,
    )
    schedule = SimulatedSchedule(policy, MARGIN_GBPS, EPOCH_S, limits)
    outcome = simulate(arrivals, link, schedule)
    assert (len(outcome.clients), outcome.refused) == (len(arrivals), [])
    for_life = simulate(arrivals, link, replace(schedule, rates=FOR_LIFE))
    assert for_life.refused


# --- at any time ---


@dataclass(frozen=True)
class Coming:
    """A delivery; one without a window is outside of the pool."""

    at_s: float
    demand: Demand
    rate_max: float


comings = st.lists(
    st.builds(
        Coming,
        at_s=st.floats(0.0, 0.3),
        demand=st.builds(
            Demand,
            layer_bytes=st.integers(1 << 10, 1 << 20),
            compute_window_s=st.none() | st.floats(0.0001, 0.1),
            num_layers=st.integers(1, 40),
            tenant=st.sampled_from(TENANTS),
        ),
        rate_max=st.sampled_from([math.inf, math.inf, math.inf, 1e6]),
    ),
    min_size=1,
    max_size=40,
)
shares = st.dictionaries(
    st.sampled_from(TENANTS),
    st.builds(
        TenantShare,
        weight=st.sampled_from([0.1, 1.0, 7.0]),
        cap_gbps=st.sampled_from([0.0, 0.05, 0.5]),
    ),
)


class Watched:
    """A scheduler in virtual time, judged at every step."""

    def __init__(self, policy: PolicyName, tenants: dict[str, TenantShare]) -> None:
        configuration = a_configuration(
            policy, CAP_GBPS, margin_gbps=0.05, epoch_s=EPOCH_S, tenants=tenants
        )
        self.policy = policy
        self.caps = {
            name: share.cap_gbps * BYTES_PER_GBIT
            for name, share in tenants.items()
            if share.cap_gbps
        }
        self.scheduler: Scheduler[Job] = Scheduler(configuration, 0.0)
        self.came_s: dict[Job, float] = {}
        self.changed_s = 0.0

    def serve(self, coming: Sequence[Coming]) -> None:
        """Everybody, to their ends."""
        pending, now_s = sorted(coming, key=lambda one: one.at_s), 0.0
        while True:
            while pending and pending[0].at_s <= now_s:
                self._begin(pending.pop(0), now_s)
            step = self.scheduler.next(now_s)
            self._judge(now_s)
            if not isinstance(step, Wait):
                if step.job.is_taken:
                    self.scheduler.remove(step.job, now_s)
                    self.changed_s = now_s
                continue
            if (wake_s := min([step.until_s, *(one.at_s for one in pending)])) == math.inf:
                break
            now_s = max(now_s, wake_s)
        assert self.scheduler.flows() == []

    def _begin(self, one: Coming, now_s: float) -> None:
        job = Job(one.demand, one.demand.layer_bytes)
        self.came_s[job] = self.changed_s = now_s
        pooled = one.demand.compute_window_s is not None
        self.scheduler.add(job, one.demand, now_s, pooled=pooled, rate_max=one.rate_max)

    def _rated(self) -> Iterator[tuple[Demand, float, float]]:
        """Demand, rate and the most that is wanted, of those with a rate."""
        for flow in self.scheduler.flows():
            if flow.rate_bytes_per_s is not None:
                yield flow.demand, flow.rate_bytes_per_s, flow.demand.rate_max

    def _judge(self, now_s: float) -> None:
        rated = list(self._rated())
        total = sum(rate for _, rate, _ in rated)
        assert total <= CAP * ROUNDING
        assert self.scheduler.assigned_bytes_per_s == pytest.approx(total)
        for tenant, cap in self.caps.items():
            assert sum(rate for demand, rate, _ in rated if demand.tenant == tenant) <= (
                cap * ROUNDING
            )
        for flow in self.scheduler.flows():
            if flow.is_waiting:
                assert now_s <= self.came_s[flow.job] + EPOCH_S + 1e-9
        has_settled = now_s > self.changed_s + EPOCH_S + 1e-9
        if has_settled and rated and self.policy in WORK_CONSERVING:
            self._judge_use(total, rated)

    def _judge_use(self, total: float, rated: list[tuple[Demand, float, float]]) -> None:
        """Of what the pool may have nothing is left, unless somebody wants or may have no more."""
        if any(not flow.pooled for flow in self.scheduler.flows()) or self.caps:
            return
        assert total >= min(CAP, sum(most for _, _, most in rated)) / ROUNDING


@pytest.mark.parametrize("policy", RATE_POLICIES)
@given(coming=comings, tenants=shares)
@settings(max_examples=examples(15), deadline=None)
def test_rates_fit_are_given_within_an_epoch_and_leave_nothing(
    policy: PolicyName, coming: list[Coming], tenants: dict[str, TenantShare]
) -> None:
    Watched(policy, tenants).serve(coming)
