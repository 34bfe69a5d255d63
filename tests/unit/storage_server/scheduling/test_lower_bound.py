"""The judge of schedules: certified bounds of the least sum of delays."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lower_bound import least_delay_sum
from objectcache_storage_server.scheduling.rates.policies import RATE_POLICIES, assigned_rates
from objectcache_storage_server.scheduling.ttft_model import (
    stall_of_ttft,
    ttft_at_rate,
    ttft_of_arrivals,
)
from tests.unit.examples import examples
from tests.unit.storage_server.scheduling.paper_tables import LINK_GBPS, WORKLOADS, stall_at_rate

ROUNDING_S = 1e-6
CAP = 1e9
DEMANDS = st.lists(
    st.builds(
        Demand,
        layer_bytes=st.integers(10**6, 10**8),
        compute_window_s=st.floats(0, 0.2),
        num_layers=st.integers(1, 12),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize(
    ("workload", "least_ms", "optimum_ms"),
    [("A", 131.9, 138.2), ("B", 578.8, 609.0), ("C", 2214.9, 2331.2)],
)
def test_the_bounds_of_the_papers_workloads_enclose_the_known_optimum(
    workload: str, least_ms: float, optimum_ms: float
) -> None:
    shared = WORKLOADS[workload]
    bounds = least_delay_sum(shared.demands, shared.cap_bytes_per_s)
    alone_s = sum(stall_at_rate(demand, LINK_GBPS * BYTES_PER_GBIT) for demand in shared.demands)
    assert (bounds.lower_s - alone_s) * 1e3 >= least_ms
    assert (bounds.lower_s - alone_s) * 1e3 <= optimum_ms
    assert (bounds.upper_s - alone_s) * 1e3 >= optimum_ms - 0.1
    assert bounds.lower_s >= 0.99 * bounds.upper_s - ROUNDING_S


def test_one_delivery_alone_waits_for_its_first_layer_or_for_what_the_link_cannot_carry() -> None:
    quick, slow = Demand(10**8, 0.2, 10), Demand(10**8, 0.04, 10)
    for demand, delay_s in ((quick, 0.1), (slow, 0.1 + 9 * 0.06)):
        bounds = least_delay_sum([demand], CAP)
        assert bounds.lower_s == pytest.approx(delay_s)
        assert bounds.delays_s == pytest.approx((delay_s,))


def test_of_two_deliveries_without_computing_the_smaller_goes_first() -> None:
    large, small = Demand(10**8, None, 30), Demand(10**8, 0.0, 10)
    bounds = least_delay_sum([large, small], CAP)
    assert bounds.delays_s == pytest.approx((4.0, 1.0))
    assert bounds.lower_s == pytest.approx(5.0)


def test_weights_turn_the_order_round() -> None:
    large, small = Demand(10**8, None, 30, weight=10.0), Demand(10**8, 0.0, 10)
    bounds = least_delay_sum([large, small], CAP)
    assert bounds.delays_s == pytest.approx((3.0, 4.0))
    assert bounds.lower_s == pytest.approx(34.0)


def delays_of(demands: list[Demand], sequence: list[int]) -> list[float]:
    """The delays when whole layers go in this sequence of demands."""
    arrivals_s: list[list[float]] = [[] for _ in demands]
    now_s = 0.0
    for index in sequence:
        now_s += demands[index].layer_bytes / CAP
        arrivals_s[index].append(now_s)
    return [
        stall_of_ttft(demand, ttft_of_arrivals(layers_s, demand.compute_window_s or 0.0))
        for demand, layers_s in zip(demands, arrivals_s, strict=True)
    ]


@settings(max_examples=examples(15))
@given(DEMANDS, st.data())
def test_no_sequence_of_layers_undercuts_the_lower_bound(
    demands: list[Demand], data: st.DataObject
) -> None:
    layers = [index for index, demand in enumerate(demands) for _ in range(demand.num_layers)]
    sequence = data.draw(st.permutations(layers))
    bounds = least_delay_sum(demands, CAP, nodes_max=100)
    delays = delays_of(demands, sequence)
    cost_s = sum(demand.weight * delay for demand, delay in zip(demands, delays, strict=True))
    assert cost_s >= bounds.lower_s - ROUNDING_S


@settings(max_examples=examples(15))
@given(DEMANDS)
def test_the_delays_of_the_upper_bound_can_be_had_by_earliest_due_time_first(
    demands: list[Demand],
) -> None:
    bounds = least_delay_sum(demands, CAP, nodes_max=20)
    due = [
        (delay_s + layer * (demand.compute_window_s or 0.0), index)
        for index, (demand, delay_s) in enumerate(zip(demands, bounds.delays_s, strict=True))
        for layer in range(demand.num_layers)
    ]
    reached = delays_of(demands, [index for _, index in sorted(due)])
    assert all(
        found <= delay + ROUNDING_S for found, delay in zip(reached, bounds.delays_s, strict=True)
    )
    upper_s = sum(d.weight * delay for d, delay in zip(demands, bounds.delays_s, strict=True))
    assert bounds.upper_s == pytest.approx(upper_s)
    assert bounds.lower_s <= bounds.upper_s


@settings(max_examples=examples(10))
@given(DEMANDS)
def test_no_policy_that_assigns_rates_undercuts_the_lower_bound(demands: list[Demand]) -> None:
    bounds = least_delay_sum(demands, CAP, nodes_max=100)
    for policy in RATE_POLICIES:
        rates = assigned_rates(policy, demands, CAP)
        cost_s = sum(
            demand.weight * stall_of_ttft(demand, ttft_at_rate(demand, rate))
            for demand, rate in zip(demands, rates, strict=True)
        )
        assert cost_s >= bounds.lower_s - ROUNDING_S


def test_the_bounds_enclose_the_best_of_all_sequences_of_small_deliveries() -> None:
    demands = [Demand(10**8, 0.15, 3), Demand(2 * 10**8, 0.3, 3), Demand(5 * 10**7, 0.02, 3)]
    sequences = set(itertools.permutations([0, 0, 0, 1, 1, 1, 2, 2, 2]))
    best_s = min(sum(delays_of(demands, list(sequence))) for sequence in sequences)
    bounds = least_delay_sum(demands, CAP)
    assert bounds.lower_s <= best_s + ROUNDING_S
    assert best_s <= bounds.upper_s * 1.1  # whole layers are a little worse than any division


def test_many_alike_are_bounded_as_closely_as_few() -> None:
    bounds = least_delay_sum([Demand(10**7, 0.02, 8)] * 8, CAP)
    assert bounds.lower_s >= 0.9 * bounds.upper_s


def test_a_search_that_ends_early_is_lower_and_still_a_bound() -> None:
    shared = WORKLOADS["C"]
    early = least_delay_sum(shared.demands, shared.cap_bytes_per_s, nodes_max=0)
    late = least_delay_sum(shared.demands, shared.cap_bytes_per_s)
    assert 0 < early.lower_s < late.lower_s <= early.upper_s


def test_nothing_waits_for_nothing() -> None:
    assert least_delay_sum([], CAP) == (0.0, 0.0, ())
