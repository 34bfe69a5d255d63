"""What a delivery costs its GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.rates.policies import assigned_rates
from objectcache_storage_server.scheduling.ttft_model import (
    added_ttft,
    stall_of_ttft,
    ttft_at_rate,
    ttft_of_arrivals,
)
from tests.unit.storage_server.scheduling.paper_tables import (
    LINK_GBPS,
    MARGIN_GBPS,
    WORKLOADS,
    stall_at_rate,
)

DEMANDS = st.builds(
    Demand,
    layer_bytes=st.integers(1, 10**9),
    compute_window_s=st.floats(0, 1),
    num_layers=st.integers(1, 80),
)
RATES = st.floats(1e6, 1e12)


@pytest.mark.parametrize(
    ("workload", "policy", "added_ms"),
    [
        ("A", "equal", 1167),
        ("A", "stall_opt", 423),
        ("A", "calibrated_stall_opt", 444),
        ("B", "equal", 3462),
        ("B", "stall_opt", 1294),
        ("B", "calibrated_stall_opt", 1703),
        ("C", "equal", 9513),
        ("C", "stall_opt", 6212),
        ("C", "calibrated_stall_opt", 7674),
    ],
)
def test_the_added_ttft_of_the_papers_workloads_is_what_the_design_states(
    workload: str, policy: str, added_ms: float
) -> None:
    shared = WORKLOADS[workload]
    rates = assigned_rates(
        policy, shared.demands, shared.cap_bytes_per_s, MARGIN_GBPS * BYTES_PER_GBIT
    )
    added_s = sum(
        added_ttft(demand, ttft_at_rate(demand, rate), LINK_GBPS * BYTES_PER_GBIT)
        for demand, rate in zip(shared.demands, rates, strict=True)
    )
    assert added_s * 1e3 == pytest.approx(added_ms, abs=0.5)


def test_a_layer_that_comes_slower_than_it_is_computed_stalls_every_layer() -> None:
    demand = Demand(layer_bytes=100, compute_window_s=1.0, num_layers=4)
    assert ttft_at_rate(demand, 50.0) == 2.0 + 3 * 2.0 + 1.0
    assert stall_at_rate(demand, 50.0) == 2.0 + 3 * 1.0


def test_above_the_zero_stall_rate_only_the_first_layer_is_waited_for() -> None:
    demand = Demand(layer_bytes=100, compute_window_s=1.0, num_layers=4)
    assert ttft_at_rate(demand, 400.0) == 0.25 + 4.0
    assert stall_at_rate(demand, 400.0) == 0.25
    assert stall_at_rate(demand, demand.zero_stall_rate) == 1.0


def test_without_a_window_the_transfer_is_all() -> None:
    assert ttft_at_rate(Demand(100, None, 4), 50.0) == 8.0


@given(DEMANDS, RATES)
def test_constant_rates_are_a_case_of_arrivals(demand: Demand, rate: float) -> None:
    transfer_s = demand.layer_bytes / rate
    arrivals_s = [transfer_s * (layer + 1) for layer in range(demand.num_layers)]
    ttft_s = ttft_of_arrivals(arrivals_s, demand.compute_window_s or 0.0)
    assert ttft_s == pytest.approx(ttft_at_rate(demand, rate))
    assert stall_of_ttft(demand, ttft_s) == pytest.approx(stall_at_rate(demand, rate), abs=1e-9)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.floats(0, 1))
def test_the_first_token_comes_when_a_gpu_that_waits_for_each_layer_is_through(
    gaps_s: list[float], window_s: float
) -> None:
    arrivals_s = [sum(gaps_s[: layer + 1]) for layer in range(len(gaps_s))]
    through_s = 0.0
    for arrival_s in arrivals_s:
        through_s = max(through_s, arrival_s) + window_s
    assert ttft_of_arrivals(arrivals_s, window_s) == pytest.approx(through_s)


def test_one_late_layer_in_the_middle_delays_by_its_lateness_alone() -> None:
    on_time = [0.5, 1.5, 2.5, 3.5]
    late = [0.5, 1.5, 3.25, 3.5]
    assert ttft_of_arrivals(on_time, 1.0) == 4.5
    assert ttft_of_arrivals(late, 1.0) == 5.25


@given(DEMANDS, RATES)
def test_alone_on_the_link_nothing_is_added(demand: Demand, rate: float) -> None:
    assert added_ttft(demand, ttft_at_rate(demand, rate), rate) == 0.0
    assert added_ttft(demand, ttft_at_rate(demand, rate / 2), rate) >= 0.0
