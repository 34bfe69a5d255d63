"""Whose turn it is in each lane."""

from __future__ import annotations

import gc
import math
import weakref

import pytest

from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.delivery_flow import FLOW_CATCH_UP_S, Flow
from objectcache_storage_server.scheduling.lanes.due_times import PLANNED_MAX
from objectcache_storage_server.scheduling.lanes.fair_lane import FairLane, FlowLane
from objectcache_storage_server.scheduling.lanes.keyed_line import KeyedLine
from objectcache_storage_server.scheduling.lanes.rate_lane import RateLane
from objectcache_storage_server.scheduling.lanes.split_link import Sides
from objectcache_storage_server.scheduling.lanes.urgent_lane import UrgentLane
from tests.scheduled_jobs import Job

MIB = 1 << 20


def a_flow(
    layer_bytes: int = 1000,
    window_s: float | None = None,
    num_layers: int = 8,
    *,
    rate: float | None = None,
    weight: float = 1.0,
    tenant: str = "",
) -> Flow[Job]:
    demand = Demand(layer_bytes, window_s, num_layers, weight, tenant)
    flow = Flow(Job(demand, layer_bytes), demand, pooled=True, rate_max=math.inf, now_s=0.0)
    flow.assign(rate, 0.0)
    return flow


def send(lane: FlowLane[Job], now_s: float, length_bytes: int) -> Flow[Job]:
    flow = lane.choose(now_s)
    assert flow is not None
    flow.pace.charge(length_bytes, now_s)
    flow.sent(length_bytes, now_s)
    lane.sent(flow, length_bytes, now_s)
    return flow


# --- lines ---


def test_a_line_gives_the_least_key_and_among_equals_the_first_to_come() -> None:
    line: KeyedLine[str] = KeyedLine()
    for item, key in (("a", 2.0), ("b", 1.0), ("c", 1.0)):
        line.put(item, key)
    assert line.first() == (1.0, "b")
    line.put("b", 3.0)
    assert line.first() == (1.0, "c")
    line.discard("c")
    line.discard("c")
    assert line.first() == (2.0, "a")
    assert line.stalest() == "a"
    assert len(line) == 2


def test_a_line_does_not_grow_with_the_times_an_item_moves_nor_keep_it_alive() -> None:
    line: KeyedLine[Flow[Job]] = KeyedLine()
    staying, leaving = a_flow(), a_flow()
    line.put(staying, 0.0)
    for key in range(1000):
        line.put(leaving, 1.0 + key)
    gone = weakref.ref(leaving)
    line.discard(leaving)
    del leaving
    for key in range(1000):
        line.put(staying, float(key))
    gc.collect()
    assert gone() is None


# --- every lane ---

LANES = [FairLane, lambda: RateLane[Job](Sides()), lambda: UrgentLane[Job](lambda now_s: 1e6)]


@pytest.mark.parametrize("make", LANES)
def test_who_sleeps_is_not_chosen_until_it_is_woken(make: type[FairLane[Job]]) -> None:
    lane: FlowLane[Job] = make()
    flow = a_flow(rate=1e6)
    lane.add(flow, 0.0)
    assert lane.choose(0.0) is flow
    lane.sleep(flow, 0.0)
    assert lane.choose(0.0) is None
    assert lane.wake_at_s == math.inf
    lane.wake(flow, 0.0)
    assert lane.choose(0.0) is flow


@pytest.mark.parametrize("make", LANES)
def test_who_is_parked_is_chosen_when_its_time_comes(make: type[FairLane[Job]]) -> None:
    lane: FlowLane[Job] = make()
    flow = a_flow(rate=1e6)
    lane.add(flow, 0.0)
    assert lane.choose(0.0) is flow
    lane.park(flow, 2.0)
    assert lane.choose(1.9) is None
    assert lane.wake_at_s == 2.0
    assert lane.choose(2.0) is flow


@pytest.mark.parametrize("make", LANES)
def test_who_was_discarded_is_not_chosen_whatever_it_was_doing(make: type[FairLane[Job]]) -> None:
    lane: FlowLane[Job] = make()
    flows = [a_flow(rate=1e6, tenant="t") for _ in range(4)]
    for flow in flows:
        lane.add(flow, 0.0)
    for stop in (lane.sleep, lane.park, lane.hold):
        chosen = lane.choose(0.0)
        assert chosen is not None
        stop(chosen, 1.0)
    for flow in flows:
        lane.discard(flow)
        lane.wake(flow, 0.0)
    assert lane.choose(5.0) is None
    assert lane.wake_at_s == math.inf


@pytest.mark.parametrize("make", LANES)
def test_of_those_held_for_a_tenant_one_is_let_go_at_a_time(make: type[FairLane[Job]]) -> None:
    lane: FlowLane[Job] = make()
    flows = [a_flow(rate=1e6, tenant="t") for _ in range(3)]
    for flow in flows:
        lane.add(flow, 0.0)
    for _ in flows:
        chosen = lane.choose(0.0)
        assert chosen is not None
        lane.hold(chosen, 1.0)
    assert lane.choose(0.5) is None
    assert lane.wake_at_s == 1.0
    first = send(lane, 1.0, 1000)
    lane.let_go(("t", ""), 2.0)
    lane.hold(first, 2.0)
    assert lane.choose(1.0) is None
    assert lane.wake_at_s == 2.0
    second = lane.choose(2.0)
    assert second is not None
    assert second is not first
    lane.sleep(second, 2.0)  # it has nothing to send: the next one may go at once
    third = lane.choose(2.0)
    assert third is not None
    assert third not in (second,)
    lane.discard(third)
    assert lane.choose(2.0) is first


# --- each lane ---


def test_a_tenants_fair_weight_is_shared_by_its_flows() -> None:
    lane: FairLane[Job] = FairLane()
    flows = [a_flow(tenant=tenant) for tenant in "abbb"]
    for flow in flows:
        lane.add(flow, 0.0)
    sent = dict.fromkeys("ab", 0)
    for _ in range(1200):
        sent[send(lane, 0.0, MIB).demand.tenant] += 1
    assert sent["a"] == pytest.approx(sent["b"], rel=0.05)


def test_of_flows_with_rates_the_one_that_waits_longest_goes_first() -> None:
    lane: RateLane[Job] = RateLane(Sides())
    slow, fast = a_flow(rate=100.0), a_flow(rate=400.0)
    lane.add(slow, 0.0)
    lane.add(fast, 0.0)
    assert lane.rate_bytes_per_s == 500.0
    assert [send(lane, 0.0, 100) for _ in range(5)].count(fast) == 4
    lane.discard(slow)
    assert lane.rate_bytes_per_s == 400.0


def test_flows_that_sleep_for_long_are_not_counted_until_they_wake() -> None:
    sides = Sides()
    sides.change({"long": 100.0, "short": 200.0, "awake": 400.0})
    lane: RateLane[Job] = RateLane(sides)
    long, short, awake = (
        a_flow(rate=rate, tenant=tenant)
        for tenant, rate in (("long", 100.0), ("short", 200.0), ("awake", 400.0))
    )
    for flow in (long, short, awake):
        sides.add(flow.demand.tenant, pooled=True)
        lane.add(flow, 0.0)
    assert lane.idle_at_s == math.inf
    lane.sleep(long, 1.0)
    lane.sleep(short, 1.1)
    lane.leave_out_idle(1.0)
    assert (lane.rate_bytes_per_s, sides.pool_weight) == (700.0, 700.0)
    assert lane.idle_at_s == 1.0 + FLOW_CATCH_UP_S
    lane.leave_out_idle(1.0 + FLOW_CATCH_UP_S)
    assert (lane.rate_bytes_per_s, sides.pool_weight) == (600.0, 600.0)
    assert lane.not_idle() == [short, awake]
    assert lane.idle_at_s == 1.1 + FLOW_CATCH_UP_S
    lane.wake(short, 2.0)
    assert lane.idle_at_s == math.inf
    lane.wake(long, 2.0)
    assert (lane.rate_bytes_per_s, sides.pool_weight) == (700.0, 700.0)
    lane.sleep(long, 3.0)
    lane.leave_out_idle(4.0)
    lane.discard(long)
    sides.discard("long", pooled=True)
    assert (lane.rate_bytes_per_s, sides.pool_weight) == (600.0, 600.0)


def test_the_urgent_lane_serves_the_earliest_due_layer_of_its_plan() -> None:
    lane: UrgentLane[Job] = UrgentLane(lambda now_s: 1000.0)
    small, large = a_flow(100, 1.0, 4), a_flow(900, 2.0, 4)
    lane.add(large, 0.0)
    lane.add(small, 0.0)
    order = [send(lane, 0.0, 100), send(lane, 0.1, 900), send(lane, 1.0, 100), send(lane, 1.1, 100)]
    assert order == [small, large, small, small]


def test_past_the_planned_number_late_flows_go_by_urgency_and_age() -> None:
    lane: UrgentLane[Job] = UrgentLane(lambda now_s: 1e4)
    huge = a_flow(50_000, 0.001, 32)
    lane.add(huge, 0.0)
    for _ in range(PLANNED_MAX + 8):
        lane.add(a_flow(1000, 0.001, 8), 0.0)
    assert send(lane, 0.0, 1000) is not huge
    served_s: float | None = None
    for step in range(1, 20_000):
        now_s = step * 0.1
        flow = lane.choose(now_s)
        assert flow is not None
        if flow is huge:
            served_s = now_s
            break
        lane.discard(flow)  # it is through, and the next one comes
        fresh = a_flow(1000, 0.001, 8)
        fresh.begun_s = fresh.origin_s = fresh.planned_s = now_s
        lane.add(fresh, now_s)
    assert served_s is not None
