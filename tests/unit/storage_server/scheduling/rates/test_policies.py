"""Rates of the policies: the paper's allocations, and what must hold of any."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.rates.policies import RATE_POLICIES, assigned_rates
from tests.unit.storage_server.scheduling.paper_tables import MARGIN_GBPS, POLICIES, WORKLOADS

ROUNDING = 1 + 1e-9
DEMANDS = st.lists(
    st.builds(
        Demand,
        layer_bytes=st.integers(1, 10**9),
        compute_window_s=st.none() | st.floats(1e-4, 10),
        num_layers=st.integers(1, 80),
        weight=st.floats(0.001, 1000),
        tenant=st.sampled_from("abc"),
    ),
    min_size=1,
    max_size=12,
)
CAPS = st.floats(1e3, 1e12)
MARGINS = st.sampled_from([0.0, 6.25e8])
TENANT_CAPS = st.dictionaries(st.sampled_from("abcd"), st.floats(1e3, 1e11))
policies = pytest.mark.parametrize("policy", RATE_POLICIES)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_rates_are_those_of_table_a9(workload: str, policy: str) -> None:
    shared = WORKLOADS[workload]
    rates = assigned_rates(
        policy, shared.demands, shared.cap_bytes_per_s, MARGIN_GBPS * BYTES_PER_GBIT
    )
    column = POLICIES.index(policy)
    expected = [row[column] for row in shared.allocations_gbps.values()]
    assert [rate / BYTES_PER_GBIT for rate in rates] == pytest.approx(expected, abs=0.02)


def test_table_a9_has_seventy_allocations() -> None:
    rows = [row for shared in WORKLOADS.values() for row in shared.allocations_gbps.values()]
    assert sum(map(len, rows)) == 70


def most(policy: str, demand: Demand, margin: float) -> float:
    """The rate beyond which a policy does not go."""
    if policy == "stall_opt":
        return demand.zero_stall_rate
    return demand.zero_stall_rate + margin if policy == "calibrated_stall_opt" else math.inf


@policies
@given(DEMANDS, CAPS, MARGINS, TENANT_CAPS)
def test_no_cap_is_exceeded_and_everybody_gets_something(
    policy: str, demands: list[Demand], cap: float, margin: float, tenant_caps: dict[str, float]
) -> None:
    rates = assigned_rates(policy, demands, cap, margin, tenant_caps)
    assert min(rates) > 0
    assert sum(rates) <= cap * ROUNDING
    for demand, rate in zip(demands, rates, strict=True):
        assert rate <= most(policy, demand, margin) * ROUNDING
    for tenant, tenant_cap in tenant_caps.items():
        assert tenant_sum(demands, rates, tenant) <= tenant_cap * ROUNDING


@policies
@given(DEMANDS, CAPS, TENANT_CAPS, st.dictionaries(st.sampled_from("xy"), st.floats(1e5, 1e10)))
def test_no_nic_is_sent_more_than_it_carries_and_what_it_leaves_goes_to_others(
    policy: str,
    demands: list[Demand],
    cap: float,
    tenant_caps: dict[str, float],
    carried: dict[str, float],
) -> None:
    demands = [replace(one, nic="xyz"[index % 3]) for index, one in enumerate(demands)]
    nic_caps = {(one.tenant, one.nic): carried[one.nic] for one in demands if one.nic in carried}
    rates = assigned_rates(policy, demands, cap, 0.0, tenant_caps, nic_caps)
    assert min(rates) > 0
    assert sum(rates) <= cap * ROUNDING
    full = set[tuple[str, str]]()
    for nic, nic_cap in nic_caps.items():
        pairs = zip(demands, rates, strict=True)
        together = sum(rate for one, rate in pairs if (one.tenant, one.nic) == nic)
        assert together <= nic_cap * ROUNDING
        if together >= nic_cap / ROUNDING:
            full.add(nic)
    if sum(rates) >= cap / ROUNDING:
        return
    for demand, rate in zip(demands, rates, strict=True):
        of_tenant = tenant_sum(demands, rates, demand.tenant)
        is_full = of_tenant >= tenant_caps.get(demand.tenant, math.inf) / ROUNDING
        is_full = is_full or (demand.tenant, demand.nic) in full
        assert is_full or rate >= most(policy, demand, 0.0) / ROUNDING


def tenant_sum(demands: Sequence[Demand], rates: Sequence[float], tenant: str) -> float:
    pairs = zip(demands, rates, strict=True)
    return sum(rate for demand, rate in pairs if demand.tenant == tenant)


@policies
@given(DEMANDS, CAPS, MARGINS, TENANT_CAPS)
def test_the_link_is_used_up_unless_every_demand_has_all_that_it_may(
    policy: str, demands: list[Demand], cap: float, margin: float, tenant_caps: dict[str, float]
) -> None:
    rates = assigned_rates(policy, demands, cap, margin, tenant_caps)
    if sum(rates) >= cap / ROUNDING:
        return
    for demand, rate in zip(demands, rates, strict=True):
        of_tenant = tenant_sum(demands, rates, demand.tenant)
        tenant_is_full = of_tenant >= tenant_caps.get(demand.tenant, math.inf) / ROUNDING
        assert tenant_is_full or rate >= most(policy, demand, margin) / ROUNDING


@policies
@given(DEMANDS, CAPS, TENANT_CAPS, st.randoms(use_true_random=False))
def test_the_order_of_the_demands_does_not_matter(
    policy: str,
    demands: list[Demand],
    cap: float,
    tenant_caps: dict[str, float],
    shuffling: random.Random,
) -> None:
    order = list(range(len(demands)))
    shuffling.shuffle(order)
    rates = assigned_rates(policy, demands, cap, 1e8, tenant_caps)
    shuffled = assigned_rates(policy, [demands[at] for at in order], cap, 1e8, tenant_caps)
    assert shuffled == pytest.approx([rates[at] for at in order], rel=1e-9)


def weighted_transfer_s(demands: Sequence[Demand], rates: Sequence[float]) -> float:
    """What stall_opt minimises (paper, Equation 6)."""
    pairs = zip(demands, rates, strict=True)
    return sum(demand.weight * demand.layer_bytes / rate for demand, rate in pairs)


@pytest.mark.parametrize("policy", ["stall_opt", "calibrated_stall_opt"])
@given(DEMANDS, CAPS, MARGINS, TENANT_CAPS, st.floats(0.001, 0.5), st.data())
def test_taking_from_one_delivery_for_another_never_makes_the_stalls_less(
    policy: str,
    demands: list[Demand],
    cap: float,
    margin: float,
    tenant_caps: dict[str, float],
    part: float,
    data: st.DataObject,
) -> None:
    rates = assigned_rates(policy, demands, cap, margin, tenant_caps)
    giver, taker = (data.draw(st.integers(0, len(demands) - 1)) for _ in range(2))
    room = most(policy, demands[taker], margin) - rates[taker]
    if demands[giver].tenant != demands[taker].tenant:
        tenant_cap = tenant_caps.get(demands[taker].tenant, math.inf)
        room = min(room, tenant_cap - tenant_sum(demands, rates, demands[taker].tenant))
    moved = max(0.0, min(part * rates[giver], room))
    others = list(rates)
    others[giver] -= moved
    others[taker] += moved
    assert weighted_transfer_s(demands, others) >= weighted_transfer_s(demands, rates) / ROUNDING


def test_weights_multiply_what_a_policy_shares_by() -> None:
    small, large = Demand(100, 0.01, 10, weight=3.0), Demand(400, 0.02, 5, weight=1.0)
    rates = {policy: assigned_rates(policy, [small, large], 1000.0) for policy in RATE_POLICIES}
    assert rates["equal"] == pytest.approx([750.0, 250.0])
    assert rates["kv_prop"] == pytest.approx([600.0, 400.0])  # 3 x 1000 bytes to 2000
    assert rates["bw_prop"] == pytest.approx([600.0, 400.0])  # 3 x 10,000 bytes/s to 20,000
    root = math.sqrt(300) / (math.sqrt(300) + math.sqrt(400))
    assert rates["stall_opt"] == pytest.approx([1000 * root, 1000 * (1 - root)])


def test_a_tenant_is_held_to_its_cap_and_the_others_have_what_it_leaves() -> None:
    demands = [Demand(100, None, 1, tenant=tenant) for tenant in ("a", "a", "b", "c")]
    rates = assigned_rates("equal", demands, 400.0, tenant_caps={"a": 100.0, "b": 120.0})
    assert rates == pytest.approx([50.0, 50.0, 120.0, 180.0])


def test_inside_a_capped_tenant_the_policy_still_holds() -> None:
    demands = [Demand(bytes_, None, 1, tenant="a") for bytes_ in (100, 300)]
    others = [Demand(100, None, 1, tenant="b")]
    rates = assigned_rates("kv_prop", demands + others, 1000.0, tenant_caps={"a": 100.0})
    assert rates == pytest.approx([25.0, 75.0, 900.0])


@pytest.mark.parametrize("window_s", [None, 0.0])
def test_a_delivery_without_a_window_has_no_zero_stall_rate(window_s: float | None) -> None:
    demands = [Demand(100, window_s, 1), Demand(100, 1.0, 1)]
    assert assigned_rates("stall_opt", demands, 1000.0) == pytest.approx([900.0, 100.0])
    assert assigned_rates("calibrated_stall_opt", demands, 1000.0, 50.0) == [850.0, 150.0]


def test_bw_prop_gives_a_delivery_without_a_window_its_weights_share_first() -> None:
    demands = [Demand(100, None, 1, weight=2.0), Demand(100, 1.0, 1), Demand(300, 1.0, 1)]
    assert assigned_rates("bw_prop", demands, 1000.0) == pytest.approx([500.0, 125.0, 375.0])


def test_bw_prop_is_equal_where_no_window_is_known() -> None:
    demands = [Demand(100, None, 1), Demand(900, None, 1, weight=3.0)]
    assert assigned_rates("bw_prop", demands, 1000.0) == pytest.approx([250.0, 750.0])


@policies
def test_no_demands_have_no_rates(policy: str) -> None:
    assert assigned_rates(policy, [], 1000.0) == []


@policies
def test_without_a_cap_a_rate_ends_at_what_the_policy_needs(policy: str) -> None:
    (rate,) = assigned_rates(policy, [Demand(100, 0.5, 1)], math.inf, 50.0)
    assert rate == {"stall_opt": 200.0, "calibrated_stall_opt": 250.0}.get(policy, math.inf)


def test_a_small_weight_beside_a_huge_one_gets_its_exact_share() -> None:
    demands = [Demand(10**15, 1e6, 1), Demand(1, 1e-6, 1), Demand(4, 1e-6, 1)]
    rates = assigned_rates("stall_opt", demands, 1e9 + 3e3)
    assert rates == pytest.approx([1e9, 1e3, 2e3], rel=1e-9)


def test_what_rounding_would_take_from_the_smallest_share_it_keeps() -> None:
    demands = [Demand(10**9, None, 80, 1000.0, tenant="a"), Demand(1, None, 1, 0.001, tenant="b")]
    rates = assigned_rates("kv_prop", demands, 1e3, tenant_caps={"a": 1e3 * (1 - 2**-53)})
    assert rates[1] > 0


@pytest.mark.parametrize("policy", RATE_POLICIES)
@pytest.mark.parametrize("tenant_caps", [{}, {"a": 1e9, "b": 3e8}])
def test_many_demands_get_the_rates_that_few_would_by_lists(
    policy: str, tenant_caps: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    chooser = random.Random(7)
    demands = [
        Demand(
            chooser.randint(1, 10**8),
            chooser.choice([None, chooser.uniform(0.001, 0.1)]),
            chooser.randint(1, 80),
            chooser.uniform(0.1, 10),
            chooser.choice("abc"),
        )
        for _ in range(500)
    ]
    for cap in (1e6, 1e9, 1e10, 1e13, math.inf):
        arrays = assigned_rates(policy, demands, cap, 1e6, tenant_caps)
        with monkeypatch.context() as patched:
            patched.setattr(f"{assigned_rates.__module__}.ARRAYS_MIN", len(demands))
            assert arrays == pytest.approx(assigned_rates(policy, demands, cap, 1e6, tenant_caps))
        assert all(type(rate) is float for rate in arrays)
