"""Requests that share blocks of a failed load: none of them computes on what is not there."""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

import pytest
from vllm.v1.request import Request

from tests.engines.test_vllm_connector import (
    StartEngine,
    configs,
    prompt,
    start,
    stored_by_another,
)
from tests.engines.test_vllm_failed_loads import fail_next_load, run_until_failed
from tests.engines.vllm_engine import Engine, EngineConfigs, layer_names, same_bytes

SHARED = 320


@pytest.mark.parametrize("step_tokens", [0, 64, 100])
def test_requests_that_share_a_failed_load_are_all_right(
    start: StartEngine, step_tokens: int
) -> None:
    """With `step_tokens` it takes a request several steps to compute the failed blocks again."""
    tokens = prompt(200 + step_tokens, SHARED)
    stored_by_another(start, tokens)
    second = start()
    fail_next_load(second)
    requests = [
        second.add(f"sharer {number}", tokens + prompt(400 + number, 30), answer_tokens=5)
        for number in range(3)
    ]
    run_until_failed(second)
    second.scheduler.scheduler_config.long_prefill_token_threshold = step_tokens
    second.run()
    assert [second.wrong_positions(request) for request in requests] == [[], [], []]
    assert [request.num_output_tokens for request in requests] == [5, 5, 5]


def wrong_now(engine: Engine, request: Request) -> list[int]:
    """Positions of the prompt whose KV in the engine's blocks is not what the model computes."""
    return [
        position
        for position in range(request.num_prompt_tokens)
        if not all(
            same_bytes(held, expected)
            for layer, name in enumerate(layer_names())
            for held, expected in engine._places(request, position, layer, name)
        )
    ]


@pytest.mark.parametrize("step_tokens", [0, 100])
def test_with_steps_under_way_requests_that_share_a_failed_load_go_on_from_right_kv(
    start: StartEngine, configs: EngineConfigs, monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    tokens = prompt(500 + step_tokens, SHARED)
    stored_by_another(start, tokens)
    monkeypatch.setattr(configs, "asynchronous", True)
    second = start(load_mode="auto")
    fail_next_load(second)
    requests = [
        second.add(f"sharer {number}", tokens + prompt(600 + number, 30), answer_tokens=5)
        for number in range(3)
    ]
    wrong: dict[str, list[int]] = {}  # of each request's last step

    def after_each() -> None:
        if second.failed_blocks:
            second.scheduler.scheduler_config.long_prefill_token_threshold = step_tokens
        for request in requests:
            whole = request.num_computed_tokens >= request.num_prompt_tokens
            if whole and request.request_id in second.scheduler.requests:
                wrong[request.request_id] = wrong_now(second, request)

    second.run_ahead(after_each=after_each)
    assert second.failed_blocks
    assert wrong == {f"sharer {number}": [] for number in range(3)}
