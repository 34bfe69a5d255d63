"""Loads of both kinds in one engine, chosen for each request: by what loads and steps took, and
whatever fails of either.
"""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.worker.measured_work import MeasuredWork
from objectcache.deliveries.delivery import Delivery
from objectcache.routes.client_routes import ASKED_FOR
from tests.engines.test_vllm_before_schedule import (
    Fresh,
    Held,
    fresh,
    refuse,
    step_until_parked,
)
from tests.engines.test_vllm_connector import (
    BLOCK_BYTES,
    StartEngine,
    configs,
    start,
    stored_by_another,
)
from tests.engines.vllm_engine import BLOCK_TOKENS, Engine
from tests.integration.served import wait_until
from tests.relay.relays import RunningRelay
from tests.servers import RunningServer, running_server

SHARED = 320
BLOCKS = SHARED // BLOCK_TOKENS
SLOW = "scheduler.cap_gbps=0.002"  # 250 kB/s: two seconds for a prompt
KILLED = "scheduler.cap_gbps=0.001"  # two seconds for a layer of 1,000 tokens


@pytest.fixture(autouse=True)
def first_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """With vLLM's other model runner nobody is asked: all requests are parked."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


def park_only(engine: Engine, *names: str) -> None:
    """Have these requests be chosen to be parked, and no others."""
    side = engine.scheduler.connector._scheduler
    side._had_better_park = lambda request, blocks, tokens: request.request_id in names


def wait_for_answers(engine: Engine) -> None:
    """So that the next step finds what is stored of every request."""
    tracked = engine.scheduler.connector._scheduler._tracked.values()
    wait_until(
        lambda: all(one.lookup.result(time.monotonic()) is not None for one in tracked),
        "the answers of lookups",
    )


def counted(engine: Engine, name: str) -> float:
    counts: list[float] = [stats.data.get(name, 0) for stats in engine.stats]
    return sum(counts)


def refuse_layerwise(engine: Engine) -> None:
    def refused(plan: LoadPlan) -> Delivery:
        raise RuntimeError("a failure that begins no pause")

    engine.worker._worker.loads._fetch = refused


def test_what_comes_slowly_is_parked_once_that_is_known(
    tmp_path: Path, start: StartEngine, fresh: Fresh
) -> None:
    prompts = [fresh(1000 + number, 500) for number in range(3)]
    with running_server(tmp_path / "data", SLOW) as server:
        first = start(on=server)
        for number, tokens in enumerate(prompts):
            first.answer(f"first {number}", tokens)
        first.saved()
        second = start(on=server, load_mode="per_request")
        for number, count in enumerate((40, 120, 200)):  # which teaches what steps take
            second.answer(f"miss {number}", fresh(1010 + number, count))
        requests = [second.add("hit 0", prompts[0])]
        second.run()
        assert counted(second, "parked_hits") == 0  # no load was seen yet
        requests += [second.add(f"hit {number}", prompts[number]) for number in (1, 2)]
        second.run()
        assert counted(second, "hits") == 3
        assert counted(second, "parked_hits") == 2
        assert second.failed_blocks == set()
        assert [second.wrong_positions(request) for request in requests] == [[], [], []]


def test_what_comes_while_its_step_computes_is_not_parked(
    start: StartEngine, fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = MeasuredWork.loaded
    # A load that a busy machine held up would be worth parking.
    monkeypatch.setattr(
        MeasuredWork, "loaded", lambda work, payload_bytes, _: loaded(work, payload_bytes, 0.1)
    )
    prompts = [fresh(1020 + number, SHARED) for number in range(3)]
    first = start()
    for number, tokens in enumerate(prompts):
        first.answer(f"first {number}", tokens)
    first.saved()
    second = start(load_mode="per_request")
    second.layer_s = lambda output: 0.2
    for number, count in enumerate((40, 120)):
        second.answer(f"miss {number}", fresh(1030 + number, count))
    for number, tokens in enumerate(prompts):
        assert second.answer(f"hit {number}", tokens + fresh(1040 + number, 30)) == SHARED
    assert counted(second, "hits") == 3
    assert counted(second, "parked_hits") == 0
    choice = second.scheduler.connector._scheduler._choice
    expected = choice.expected(BLOCKS, SHARED, SHARED + 30)
    assert expected.payload_bytes == BLOCKS * BLOCK_BYTES
    assert expected.compute_window_s >= 0.15  # it is fitted to steps that took 0.2 s and more
    assert expected.step_s >= 0.8


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_is_computed_layer_by_layer_while_another_is_parked(
    start: StartEngine, fresh: Fresh, ranks: int
) -> None:
    slow, quick = fresh(1050 + ranks, SHARED), fresh(1055 + ranks, SHARED)
    first = start(ranks=ranks)
    for name, tokens in (("slow", slow), ("quick", quick)):
        first.answer(name, tokens)
    first.saved()
    second = start(ranks=ranks, load_mode="per_request")
    park_only(second, "parked")
    held = Held(second)
    parked = second.add("parked", [*slow, 7])
    step_until_parked(second, "parked")
    computed = second.add("computed", [*quick, 7], answer_tokens=3)
    while computed.num_output_tokens < 3:
        assert "parked" not in second.step().num_scheduled_tokens
    held.let_go.set()
    second.run()
    assert second.loaded_tokens == {"parked": SHARED, "computed": SHARED}
    assert second.wrong_positions(parked) == []
    assert second.wrong_positions(computed) == []
    assert second.failed_blocks == set()


def test_a_load_of_a_step_that_fails_leaves_one_that_is_parked_alone(
    start: StartEngine, fresh: Fresh
) -> None:
    slow, quick = fresh(1060, SHARED), fresh(1061, SHARED)
    first = start()
    for name, tokens in (("slow", slow), ("quick", quick)):
        first.answer(name, tokens)
    first.saved()
    second = start(load_mode="per_request")
    park_only(second, "parked")
    refuse_layerwise(second)
    held = Held(second)
    parked = second.add("parked", [*slow, 7])
    step_until_parked(second, "parked")
    failed = second.add("failed", [*quick, 7])
    while not failed.is_finished():
        second.step()
    held.let_go.set()
    second.run()
    assert len(second.failed_blocks) == BLOCKS
    assert second.computed_tokens == SHARED + 1 + 1 + 1  # of one step for nothing
    assert second.wrong_positions(parked) == []
    assert second.wrong_positions(failed) == []


def test_a_parked_load_that_fails_takes_nothing_back_of_a_step(
    start: StartEngine, fresh: Fresh
) -> None:
    slow, quick = fresh(1070, SHARED), fresh(1071, SHARED)
    first = start()
    for name, tokens in (("slow", slow), ("quick", quick)):
        first.answer(name, tokens)
    first.saved()
    second = start(load_mode="per_request")
    park_only(second, "parked")
    refuse(second)
    parked = second.add("parked", [*slow, 7])
    computed = second.add("computed", quick + fresh(1072, 100), answer_tokens=4)
    wait_for_answers(second)
    second.run()
    assert len(second.failed_blocks) == BLOCKS
    assert second.computed_tokens == SHARED + 1 + 100 + 3
    assert second.wrong_positions(parked) == []
    assert second.wrong_positions(computed) == []


def test_of_requests_with_one_beginning_none_is_parked_on_blocks_that_fail(
    start: StartEngine, fresh: Fresh
) -> None:
    """The longer one would share the blocks that a load of the same step fills."""
    beginning = fresh(1080, SHARED)
    longer = beginning + fresh(1081, SHARED)
    stored_by_another(start, longer)
    second = start(load_mode="per_request")
    park_only(second, "longer")
    refuse_layerwise(second)
    short = second.add("short", [*beginning, 7], answer_tokens=3)
    long = second.add("longer", [*longer, 7], answer_tokens=3)
    wait_for_answers(second)
    output = second.step()
    assert list(output.num_scheduled_tokens) == ["short"]
    assert long.status == RequestStatus.WAITING
    second.run()
    assert second.loaded_tokens["longer"] in (SHARED, 2 * SHARED)
    assert counted(second, "parked_hits") == 1
    assert second.wrong_positions(short) == []
    assert second.wrong_positions(long) == []
    assert [short.num_output_tokens, long.num_output_tokens] == [3, 3]


def over_relay(engine: Engine, name: str, tokens: list[int]) -> Any:
    """A request whose router names the relay of node b."""
    request = engine.add(name, tokens)
    request.kv_transfer_params = {"objectcache": {"relay": "b"}}
    return request


def relayed(relay: RunningRelay) -> dict[str, Any]:
    """The settings of a connector that knows the relay, and takes it where it is named."""
    return {
        "relays": [f"b={relay.endpoint}"],
        "route": "direct",
        "transport": "body",
        "relay_timeout_s": 30.0,  # silent longer than it is on a busy machine
    }


def test_both_kinds_of_loads_come_over_the_relay_that_a_request_names(
    start: StartEngine, server: RunningServer, tmp_path: Path, fresh: Fresh
) -> None:
    prompts = {name: fresh(1100 + len(name), SHARED) for name in ("parked", "computed")}
    first = start()
    for name, tokens in prompts.items():
        first.answer(name, tokens)
    first.saved()
    with RunningRelay(server, tmp_path / "relay.log") as relay:
        second = start(load_mode="per_request", **relayed(relay))
        park_only(second, "parked")
        requests = [over_relay(second, name, [*tokens, 7]) for name, tokens in prompts.items()]
        second.run()
        client = second.worker._worker._store.client
        assert client.route_counts() == {("relay:b", ASKED_FOR): 2}
    assert second.loaded_tokens == dict.fromkeys(prompts, SHARED)
    assert counted(second, "parked_hits") == 1
    assert second.failed_blocks == set()
    assert [second.wrong_positions(request) for request in requests] == [[], []]


def test_a_relay_that_is_killed_while_a_request_is_parked_costs_time_alone(
    tmp_path: Path, start: StartEngine, fresh: Fresh
) -> None:
    tokens = fresh(1110, 1000)
    with running_server(tmp_path / "data", KILLED) as server:
        stored_by_another(start, tokens, on=server)
        with RunningRelay(server, tmp_path / "relay.log") as relay:
            chosen = {"load_mode": "before_schedule", "load_timeout_s": 60.0}
            second = start(on=server, **chosen, **relayed(relay))
            request = over_relay(second, "parked", [*tokens, 7])
            step_until_parked(second, "parked")
            parked = second.worker._worker.parked
            while not parked._under_way["parked"]._installed:
                second.step()
            relay.process.kill()
            second.run()
    assert second.wrong_positions(request) == []
    assert request.num_output_tokens == 1
