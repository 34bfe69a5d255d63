"""Which requests the vLLM connector parks where it chooses for each: by what loads and steps took,
and with both kinds of loads in one engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from objectcache.connectors.timing.compute_windows import NOTHING_COMPUTED, BatchShape
from objectcache.connectors.vllm.before_schedule.parking_choice import (
    ExpectedLoad,
    ParkingChoice,
    had_better_park,
)
from objectcache.connectors.vllm.load_mode import LoadMode
from objectcache.connectors.vllm.plans import NOTHING_MEASURED, WorkerMeasures
from objectcache.connectors.vllm.scheduler.scheduler_side import SchedulerSide
from objectcache.connectors.vllm.worker.measured_work import KEPT, MeasuredWork
from objectcache_schemas.limits import MIB
from tests.unit.client.connectors.vllm.test_vllm_scheduling import (
    BLOCK_BYTES,
    STEP_TOKENS_MAX,
    Asked,
    G,
    Tables,
    request_of,
    side_of,
    tokens_once_known,
)

LAYERS = 8
LOAD = ExpectedLoad(
    payload_bytes=100 * MIB,
    rate_bytes_per_s=1000 * MIB,  # 100 ms
    layer_count=LAYERS,
    compute_window_s=0.005,  # 40 ms of the step
    step_s=0.050,
)


# --- the decision ---


@pytest.mark.parametrize(
    ("changed", "parks"),
    [
        ({}, True),  # 60 ms of waiting against a step of 50 ms
        ({"step_s": 0.070}, False),
        ({"compute_window_s": 0.008}, False),  # 36 ms
        ({"layer_count": 16}, False),
        ({"rate_bytes_per_s": 2000 * MIB}, False),
        ({"payload_bytes": 50 * MIB}, False),
        ({"payload_bytes": 200 * MIB, "compute_window_s": 0.015}, True),
        ({"compute_window_s": 0.050}, False),  # it computes longer than the load takes
    ],
)
def test_a_load_is_parked_that_would_hold_a_step_up_for_longer_than_a_step(
    changed: dict[str, Any], parks: bool
) -> None:
    assert had_better_park(replace(LOAD, **changed)) is parks


@pytest.mark.parametrize("unknown", ["rate_bytes_per_s", "compute_window_s", "step_s"])
def test_of_what_is_not_known_nothing_is_parked(unknown: str) -> None:
    assert had_better_park(LOAD)
    without: dict[str, Any] = {unknown: None}
    assert not had_better_park(replace(LOAD, **without))


def test_how_long_a_step_waits_is_what_the_load_takes_longer_than_it_computes() -> None:
    assert LOAD.stall_s == pytest.approx(0.060)
    assert replace(LOAD, compute_window_s=0.020).stall_s == pytest.approx(-0.060)


# --- what it knows ---


def experienced(**measured: Any) -> ParkingChoice:
    """It has seen steps whose layers take 1 ms and 10 us a token, and loads of 100 MiB/s."""
    choice = ParkingChoice(LAYERS, MIB, STEP_TOKENS_MAX)
    layers_s = tuple(
        (BatchShape.of([(tokens, 0)]), 0.001 + 1e-5 * tokens) for tokens in (64, 128, 256, 512)
    )
    known = {"layers_s": layers_s, "loads": ((50 * MIB, 0.5),), **measured}
    choice.planned(1, NOTHING_COMPUTED, 10.0)
    choice.reported({1}, WorkerMeasures(**known), 10.2)
    return choice


def test_before_anything_was_measured_nothing_is_expected() -> None:
    load = ParkingChoice(LAYERS, MIB, STEP_TOKENS_MAX).expected(4, 100, 300)
    assert load == ExpectedLoad(4 * MIB, None, LAYERS, None, None)


def test_what_is_expected_follows_from_loads_and_steps() -> None:
    load = experienced().expected(20, 0, 200)
    assert load.payload_bytes == 20 * MIB
    assert load.rate_bytes_per_s == pytest.approx(100 * MIB)
    assert load.compute_window_s == pytest.approx(0.003, rel=0.1)
    assert load.step_s == pytest.approx(0.2)


def test_large_loads_say_more_of_the_rate_than_small_ones() -> None:
    choice = experienced(loads=((MIB, 0.1), (99 * MIB, 0.9)))
    assert choice.expected(1, 0, 100).rate_bytes_per_s == pytest.approx(100 * MIB)


def test_old_loads_are_forgotten() -> None:
    choice = experienced(loads=((MIB, 100.0),))
    for _ in range(16):
        choice.reported((), WorkerMeasures(loads=((10 * MIB, 1.0),)), 11.0)
    assert choice.expected(1, 0, 100).rate_bytes_per_s == pytest.approx(10 * MIB)


def test_a_step_takes_what_it_takes_without_its_waits_for_loads() -> None:
    choice = experienced()
    for step in range(2, 5):
        choice.planned(step, NOTHING_COMPUTED, 20.0)
        choice.reported({step - 1}, NOTHING_MEASURED, 20.5)  # of another step
        choice.reported({step}, WorkerMeasures(waited_s=0.7), 21.0)
        choice.reported({step}, NOTHING_MEASURED, 29.0)  # told again
    assert choice.expected(1, 0, 100).step_s == pytest.approx(0.3)


def test_what_goes_on_beside_it_is_computed_in_its_step() -> None:
    alone = experienced().expected(1, 0, 128).compute_window_s
    choice = experienced()
    choice.planned(2, BatchShape.of([(128, 0)]), 30.0)
    beside = choice.expected(1, 0, 128).compute_window_s
    assert alone is not None
    assert beside == pytest.approx(alone + 128e-5, rel=0.1)


def test_a_step_computes_no_more_tokens_than_it_may() -> None:
    choice = experienced()
    most = choice.expected(1, 0, STEP_TOKENS_MAX).compute_window_s
    assert choice.expected(1, 0, 10 * STEP_TOKENS_MAX).compute_window_s == most


def test_of_two_ranks_the_steps_count_once_and_the_loads_of_both() -> None:
    steps = ((BatchShape(5, 1.0), 0.1),)
    one = WorkerMeasures(steps, ((10, 1.0),), 0.5)
    both = one.with_rank(WorkerMeasures(steps, ((20, 1.0),), 0.7))
    assert both == WorkerMeasures(steps, ((10, 1.0), (20, 1.0)), 0.7)
    assert NOTHING_MEASURED.with_rank(one) == one


# --- what a worker measures ---


def test_waits_and_steps_are_told_once_and_only_so_many_are_kept() -> None:
    work = MeasuredWork()
    for number in range(KEPT + 5):
        work.computed(BatchShape(number, 1.0), 0.5)
        work.loaded(number, 0.25)
    first = work.take(2.0)
    assert len(first.layers_s) == len(first.loads) == KEPT
    assert first.loads[-1] == (KEPT + 4, 0.25)
    assert first.layers_s[-1] == (BatchShape(KEPT + 4, 1.0), 0.5)
    assert first.waited_s == 2.0
    assert work.take(2.5) == WorkerMeasures(waited_s=0.5)


# --- both kinds of loads in one scheduler ---


def per_request_side(store: Asked, load_bytes_max: int = 64 * BLOCK_BYTES) -> SchedulerSide:
    return side_of(store, load_bytes_max=load_bytes_max, mode=LoadMode.PER_REQUEST)


def choose(side: SchedulerSide, parks: bool) -> None:
    """Have everything be known that makes the choice."""
    bytes_and_s = (MIB, 100.0 if parks else 1e-6)
    step = side._verdicts.issued
    side._choice.planned(step, NOTHING_COMPUTED, 0.0)
    layers_s = tuple((BatchShape.of([(tokens, 0)]), 1e-6) for tokens in (16, 64, 256))
    side._choice.reported({step}, WorkerMeasures(layers_s, (bytes_and_s,) * 16), 0.001)


def matched(side: SchedulerSide, name: str, computed: int = 0) -> tuple[Any, int]:
    request = request_of(blocks=4, tokens=70, name=name)
    side.arrived(request)
    return request, tokens_once_known(side, request, computed)


def test_each_request_is_loaded_as_it_was_chosen() -> None:
    store = Asked()
    store.matched = 3
    side = per_request_side(store)
    choose(side, parks=True)
    slow, tokens = matched(side, "slow")
    assert side.parks(slow)
    side.allocated(slow, [1, 2, 3, 4], tokens)
    choose(side, parks=False)
    quick, tokens = matched(side, "quick")
    assert not side.parks(quick)
    side.allocated(quick, [5, 6, 7, 8], tokens)
    plan = side.plan({"quick": 22}, Tables())
    assert [load.request_id for load in plan.parked] == ["slow"]
    assert [load.request_id for load in plan.loads] == ["quick"]
    counts = side.take_counts()
    assert (counts["hits"], counts["parked_hits"]) == (2, 1)
    side.close()


def test_who_is_parked_holds_no_block_that_a_load_of_the_step_fills() -> None:
    store = Asked()
    store.matched = 3
    side = per_request_side(store)
    choose(side, parks=False)
    quick, tokens = matched(side, "quick")
    side.allocated(quick, [5, 6, 7, 8], tokens)
    choose(side, parks=True)
    _, tokens = matched(side, "of its own")
    assert tokens == 3 * G
    sharing = request_of(blocks=4, tokens=70, name="sharing")
    side.arrived(sharing)
    answer = side._tracked["sharing"].lookup._answer
    assert answer is not None
    answer.result(10.0)
    assert side.matched_tokens(sharing, G) is None
    side.plan({"quick": 22}, Tables())
    assert side.matched_tokens(sharing, G) == 2 * G
    side.close()


def test_what_a_parked_request_could_not_load_spoils_no_step() -> None:
    store = Asked()
    store.matched = 3
    side = per_request_side(store)
    choose(side, parks=True)
    slow, tokens = matched(side, "slow")
    side.allocated(slow, [1, 2, 3, 4], tokens)
    choose(side, parks=False)
    quick, tokens = matched(side, "quick")
    side.allocated(quick, [100, 101, 102, 103], tokens)
    quick.num_computed_tokens = tokens
    plan = side.plan({"quick": 22}, Tables())
    assert plan.saves
    side.reported({plan.step}, {1, 2, 3})
    assert side.plan({}, Tables()).good == (plan.step,)
    side.close()


def test_what_a_step_could_not_load_spoils_it_beside_a_parked_request() -> None:
    store = Asked()
    store.matched = 3
    side = per_request_side(store)
    choose(side, parks=True)
    slow, tokens = matched(side, "slow")
    side.allocated(slow, [1, 2, 3, 4], tokens)
    choose(side, parks=False)
    quick, tokens = matched(side, "quick")
    side.allocated(quick, [100, 101, 102, 103], tokens)
    quick.num_computed_tokens = tokens
    plan = side.plan({"quick": 22}, Tables())
    side.reported({plan.step}, {1, 100})
    assert side.plan({}, Tables()).bad == (plan.step,)
    assert side._tracked["slow"].loaded == ()
    assert side._tracked["quick"].loaded == ()
    side.close()


def test_memory_is_shared_by_loads_of_a_step_and_of_those_that_are_parked() -> None:
    store = Asked()
    store.matched = 3
    side = per_request_side(store, load_bytes_max=8 * BLOCK_BYTES)
    choose(side, parks=True)
    slow, tokens = matched(side, "slow")
    side.allocated(slow, [1, 2, 3, 4], tokens)
    choose(side, parks=False)
    quick, tokens = matched(side, "quick")
    side.allocated(quick, [5, 6, 7, 8], tokens)
    late = request_of(blocks=4, tokens=70, name="late")
    side.arrived(late)
    answer = side._tracked["late"].lookup._answer
    assert answer is not None
    answer.result(10.0)
    assert side.matched_tokens(late, 0) is None
    side.plan({"quick": 22}, Tables())  # whose memory is free when the next step is scheduled
    assert side.matched_tokens(late, 0) == 3 * G
    side.allocated(late, [9, 10, 11, 12], 3 * G)
    side.finished("late")  # before its step
    last, tokens = matched(side, "last")
    assert tokens == 3 * G
    side.allocated(last, [9, 10, 11, 12], tokens)
    side.ended_parked(["slow"])
    side.plan({}, Tables())
    assert repr(side._budget) == "<LoadBudget 0 loads, 0/0.125 MiB>"
    side.close()
