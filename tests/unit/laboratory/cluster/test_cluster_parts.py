"""NICs, GPUs and links of the simulated cluster, one at a time."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from objectcache_dispatch import DispatchRequest, LayerTime, symmetric
from objectcache_laboratory.cluster.events import VirtualTime
from objectcache_laboratory.cluster.gpus import AgentTurn, DecodeWorker, PrefillGroup
from objectcache_laboratory.cluster.links import (
    BusyLink,
    DueTimeNic,
    FirstComeNic,
    NicRead,
    NicTraffic,
    StorageNic,
)
from objectcache_laboratory.cluster.measures import max_over_mean
from objectcache_laboratory.cluster.models import MODELS
from objectcache_laboratory.cluster.placement import PLACINGS, ClusterPlacement


def reads(
    kind: type[StorageNic], deliveries: list[tuple[float, float, int, float]]
) -> list[tuple[float, float]]:
    """(when usable, when there) of (arrival, bytes a layer, layers, compute) at 10 bytes a second;
    a hop of 0.5 s.
    """
    time = VirtualTime()
    nic = kind(time, 10.0, NicTraffic(1.0))
    usable, there = [0.0] * len(deliveries), [0.0] * len(deliveries)

    def begin(number: int) -> None:
        _, layer_bytes, layers, compute_s = deliveries[number]

        def on_usable() -> None:
            usable[number] = time.now_s

        def on_done() -> None:
            there[number] = time.now_s

        nic.read(NicRead(layer_bytes, layers, compute_s, 0.5, on_usable, on_done))

    for number, (arrival_s, *_) in enumerate(deliveries):
        time.at(arrival_s, partial(begin, number))
    time.run()
    assert nic.queue_bytes == pytest.approx(0)
    return list(zip(usable, there, strict=True))


def test_events_of_one_time_happen_in_the_order_in_which_they_were_said() -> None:
    time, happened = VirtualTime(), list[str]()
    time.at(2, lambda: happened.append("late"))
    time.at(1, lambda: time.at(0, lambda: happened.append("at once")))
    time.at(1, lambda: happened.append("second"))
    time.run(until_s=1.5)
    assert happened == ["second", "at once"]
    time.run()
    assert happened == ["second", "at once", "late"]


def test_first_come_reads_one_delivery_after_the_other() -> None:
    # 4 layers of 1 s; the prefill computes 8 s: usable with the first layer. Then one of 1 layer.
    first, second = reads(FirstComeNic, [(0, 10, 4, 8), (0, 10, 1, 1)])
    assert first == pytest.approx((1.5, 4.5))
    assert second == pytest.approx((5.5, 5.5))


def test_a_prefill_faster_than_its_nic_waits_until_the_rest_comes_in_time() -> None:
    # The last of 4 layers is there at 4 s; three layers compute for 1.5 s before it.
    (found,) = reads(FirstComeNic, [(0, 10, 4, 2)])
    assert found == pytest.approx((3.0, 4.5))


@pytest.mark.parametrize("kind", [FirstComeNic, DueTimeNic])
def test_a_delivery_alone_is_usable_at_the_same_time_in_any_order(kind: type[StorageNic]) -> None:
    (found,) = reads(kind, [(1, 10, 4, 8)])
    assert found == pytest.approx((2.5, 5.5))


def test_due_times_let_a_small_delivery_pass_one_that_is_ahead_of_its_gpu() -> None:
    slow_gpu, small = (0, 10, 6, 60), (1.5, 10, 1, 1)
    first, due = reads(FirstComeNic, [slow_gpu, small]), reads(DueTimeNic, [slow_gpu, small])
    assert first[1][0] == pytest.approx(7.5)
    assert due[1][0] == pytest.approx(3.5)  # behind the layer that was being read
    assert due[0][0] == first[0][0]  # and the other GPU lost nothing


def test_a_busy_link_carries_what_comes_later_behind() -> None:
    link = BusyLink(10.0)
    assert link.carry(0.0, 20) == 2.0
    assert link.carry(1.0, 10) == 3.0
    assert link.carry(9.0, 10) == 10.0
    assert link.carried_bytes == 40


def test_traffic_lies_in_the_windows_in_which_it_went() -> None:
    traffic = NicTraffic(1.0)
    traffic.add(0.5, 2.25, 8.0)
    assert traffic.bytes_of == [4.0, 8.0, 2.0]


def test_balance_is_the_busiest_nics_bytes_over_the_mean() -> None:
    traffic = [[1, 0, 2], [1, 0, 0], [1]]
    assert max_over_mean(traffic, 0) == pytest.approx((1 + 2) / (1 + 2 / 3))
    assert max_over_mean(traffic, 1) == 1.0  # the third window has less than that
    assert max_over_mean([[], []], 0) == 1.0


def turn(name: str, new: int, generated: int = 1) -> AgentTurn:
    return AgentTurn(0, DispatchRequest(name, 0, new, 0, 0, 1), generated, 0.0)


def test_a_group_steps_with_its_slowest_gpu_and_cuts_at_the_quota() -> None:
    time, done = VirtualTime(), list[tuple[str, float]]()
    per_token = LayerTime(0.01, 1e-9, 1.0)  # 10 ms a token
    group = PrefillGroup(
        time, 2, per_token, 0.3, lambda each: done.append((each.request.name, time.now_s))
    )

    def add() -> None:
        group.add(0, turn("long", 50))
        group.add(1, turn("short", 10))

    time.at(0, add)
    time.run()
    # "long" began at once and alone: 30 tokens, then 20 beside the 10 of "short".
    assert [name for name, _ in done] == ["long", "short"]
    assert [when for _, when in done] == pytest.approx([0.5, 0.5], abs=0.02)
    assert group.gpu_busy_s == pytest.approx(0.6, abs=0.02)


def test_requests_of_a_decode_worker_share_its_time_and_its_memory() -> None:
    time, ends = VirtualTime(), list[tuple[str, float]]()
    model = MODELS["ds660b"]
    step = model.decode_step_s
    worker = DecodeWorker(time, model, lambda each: ends.append((each.request.name, time.now_s)))

    def add(name: str, new: int, generated: int) -> None:
        worker.add(turn(name, new, generated))

    half = model.kv_capacity_tokens // 2
    time.at(0, lambda: add("a", half, 11))
    time.at(0, lambda: add("b", half - 50, 21))
    time.at(0, lambda: add("c", half, 2))  # waits for "a"
    time.run()
    two, one = step + 2 * model.decode_request_s, step + model.decode_request_s
    assert [name for name, _ in ends] == ["a", "c", "b"]
    assert ends[0][1] == pytest.approx(10 * two)
    assert ends[1][1] == pytest.approx(11 * two)
    assert ends[2][1] == pytest.approx(11 * two + 9 * one)


def test_turn_by_turn_every_pair_of_nodes_reads_half_over_each_side() -> None:
    placement = ClusterPlacement(symmetric(2, 4, gpus=2), PLACINGS["round_robin"], 1e9)
    read: dict[str, int] = {}
    for number in range(64):
        request = DispatchRequest(f"r{number}", 64, 1, 100, 100, 1)
        decision = placement.submit(request, 0.0)
        assert decision is not None
        (part,) = decision.route.parts
        read[part.node] = read.get(part.node, 0) + 1
    assert read == {"p0": 16, "p1": 16, "d0": 8, "d1": 8, "d2": 8, "d3": 8}


def test_decisions_of_a_fetch_are_those_of_what_was_submitted() -> None:
    placement = ClusterPlacement(symmetric(1, 2, gpus=2), PLACINGS["paper"], 1e9)
    assert placement.submit(DispatchRequest("r", 64, 1, 100, 100, 1), 0.0) is None
    assert placement.waiting == 1
    (decision,) = placement.fetch(0.0)
    assert decision.request.name == "r"
    assert (placement.waiting, placement.fetch(1.0)) == (0, [])
    assert np.isfinite(decision.route.predicted_lateness_s)
