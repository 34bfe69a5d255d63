"""vLLM's real scheduler, and a model that takes its time: what the server is told of it."""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest

from objectcache_schemas.operators.traces import DeliveryTrace
from tests.engines.delivery_traces import NewTraces
from tests.engines.test_vllm_connector import BUCKET, StartEngine, configs, prompt, start
from tests.engines.virtual_clock import VirtualClock
from tests.engines.vllm_engine import Engine
from tests.integration.served import wait_until
from tests.servers import RunningServer

WITHIN = 0.05  # of what is fitted to other steps
STORED = 320  # tokens of each prompt that another engine has stored
TAILS = (30, 180, 50, 120, 300, 80, 200)  # tokens behind them that are computed


def layer_s(output: Any) -> float:
    """What a layer takes the model."""
    return 0.060 + 0.000_4 * float(output.total_num_scheduled_tokens)


def stored_prompts(start: StartEngine, *seeds: int) -> list[list[int]]:
    """Prompts that another engine has computed and stored."""
    prompts = [prompt(seed, STORED) for seed in seeds]
    other = start()
    for number, tokens in enumerate(prompts):
        other.answer(f"other {number}", tokens)
    other.saved()
    return prompts


@pytest.fixture
def start_slow(start: StartEngine, monkeypatch: pytest.MonkeyPatch) -> StartEngine:
    """Engines whose model computes for a known time, and nothing else."""
    clock = VirtualClock(monkeypatch)

    def start_engine(**chosen: Any) -> Engine:
        engine = start(**chosen)
        engine._computes = False
        engine.layer_s, engine.clock = layer_s, clock
        return engine

    return start_engine


def say(traces: Sequence[DeliveryTrace], layers_s: Sequence[list[float]]) -> None:
    """Each trace has the engine's own time, as it was expected and as it was."""
    for trace, took_s in zip(traces, map(median, layers_s), strict=True):
        assert trace.window_source == "descriptor"
        assert trace.compute_window_s == pytest.approx(took_s, rel=WITHIN)
        assert trace.reported_window_s == pytest.approx(took_s)


def test_a_load_has_the_window_of_its_step_and_reports_what_it_took(
    start: StartEngine, start_slow: StartEngine, server: RunningServer
) -> None:
    prompts = stored_prompts(start, *range(500, 507))
    engine = start_slow()
    for number, count in enumerate((40, 200, 90, 380)):  # misses teach as well
        engine.answer(f"miss {number}", prompt(510 + number, count))
    traces = NewTraces(server, BUCKET)
    for number, (tokens, tail) in enumerate(zip(prompts, TAILS, strict=True)):
        assert engine.answer(f"hit {number}", tokens + prompt(520 + number, tail)) == STORED
    consumed = traces.all_consumed(len(TAILS))
    say(consumed[2:], [engine.layers_s[f"hit {number}"] for number in range(2, len(TAILS))])


def test_a_step_of_a_shape_that_was_never_seen_says_nothing(
    start: StartEngine, start_slow: StartEngine, server: RunningServer
) -> None:
    (tokens,) = stored_prompts(start, 580)
    engine = start_slow()
    for number in range(3):
        engine.answer(f"miss {number}", prompt(581 + number, 16))
    traces = NewTraces(server, BUCKET)
    engine.answer("hit", tokens + prompt(590, 120))  # far more than the engine has ever computed
    (trace,) = traces.all_consumed(1)
    assert trace.window_source == "none"
    assert trace.reported_window_s == pytest.approx(median(engine.layers_s["hit"]))


def test_all_loads_of_a_step_have_its_window(
    start: StartEngine, start_slow: StartEngine, server: RunningServer
) -> None:
    prompts = stored_prompts(start, 530, 531)
    engine = start_slow()
    for number, count in enumerate((60, 240, 120)):
        engine.answer(f"miss {number}", prompt(540 + number, count))
    traces = NewTraces(server, BUCKET)
    for number, tokens in enumerate(prompts):
        engine.add(f"hit {number}", tokens + prompt(550 + number, 70))
    lookups = [one.lookup for one in engine.scheduler.connector._scheduler._tracked.values()]
    wait_until(lambda: all(one.result(time.monotonic()) for one in lookups), "both answers")
    engine.run()
    assert list(engine.layers_s) == ["hit 0", "hit 1"]
    assert engine.layers_s["hit 0"] == engine.layers_s["hit 1"]  # of one step
    say(traces.all_consumed(2), [engine.layers_s["hit 0"]] * 2)


def test_an_engine_that_has_just_begun_says_who_it_is_and_the_server_what_it_has_learned(
    start: StartEngine, start_slow: StartEngine, server: RunningServer
) -> None:
    prompts = stored_prompts(start, *range(560, 564))
    traces = NewTraces(server, BUCKET)
    took_s: list[float] = []
    for number, tokens in enumerate(prompts):
        # The first request of each of these engines is a hit.
        engine = start_slow(compute_profile="a-llama")
        engine.answer(f"hit {number}", tokens + prompt(570 + number, 100))
        took_s.append(median(engine.layers_s[f"hit {number}"]))
    first, *_, last = traces.all_consumed(4)
    assert first.window_source == "none"
    assert first.reported_window_s == pytest.approx(took_s[0])
    assert last.window_source == "learned"
    assert last.compute_window_s == pytest.approx(median(took_s[:-1]), rel=WITHIN)
