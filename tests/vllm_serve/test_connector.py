"""`vllm serve` with the connector: answers are the model's own, whatever is stored or fails."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.vllm_serve.judge import Judge
from tests.vllm_serve.load_modes import LAYERWISE, LOAD_MODES, served_in
from tests.vllm_serve.prompts import loadable_tokens, prompt, sharing, with_another_token
from tests.vllm_serve.served_vllm import BLOCK_TOKENS, Engines, Served, ServedVllm
from tests.vllm_serve.store import Store
from tests.vllm_serve.stored_answers import assert_found_again, store_answers

pytestmark = pytest.mark.timeout(1200)

TOKENS = 1500
SLOW_GBPS = 0.02  # 2.5 MB/s: a few seconds for a layer of four prompts
STORED_TOKENS = (700, 900, 1200, 1400, 600)
TAILS_TOKENS = (120, 300, 200, 450, 160)  # behind them, that are computed


@pytest.fixture(params=LOAD_MODES, scope="module")
def served(request: pytest.FixtureRequest, store: Store, model: Path) -> Served:
    """One for each load mode."""
    return served_in(request.param, store, model)


@pytest.fixture
def vllm(engines: Engines, served: Served) -> ServedVllm:
    """A server with the connector, whose own prefix cache is empty."""
    running = engines.running(served)
    assert ("load_mode is before_schedule" in running.log) == served.asynchronous
    running.forget()
    return running


def test_the_right_answer_follows_from_every_part_of_a_prompt(judge: Judge) -> None:
    tokens = prompt(0, TOKENS)
    for place in range(7, TOKENS, TOKENS // 6):
        assert judge.answer(with_another_token(tokens, place)) != judge.answer(tokens), place


def test_what_is_loaded_gives_the_answer_that_the_model_computes(
    store: Store, vllm: ServedVllm, judge: Judge
) -> None:
    for tokens in (prompt(1, TOKENS), prompt(2, 3000)):
        assert store_answers(store, vllm, [tokens]) == judge.answers([tokens])
        loaded = vllm.loaded_tokens
        assert vllm.answer(tokens) == judge.answer(tokens)
        assert vllm.loaded_tokens - loaded == loadable_tokens(tokens)
        latest = store.deliveries()[0]
        assert latest.delivery == "layerwise"
        assert latest.chunk_count == loadable_tokens(tokens) // BLOCK_TOKENS
        assert latest.error is None


def test_a_block_that_holds_other_kv_shows_in_the_answer(
    store: Store, vllm: ServedVllm, judge: Judge
) -> None:
    tokens = prompt(3, TOKENS)
    before = store.keys()
    store_answers(store, vllm, [tokens])
    mutated, another = sorted(store.keys() - before)[:2]
    store.replace(mutated, by=another)
    assert vllm.answer(tokens) != judge.answer(tokens)


@pytest.mark.parametrize("served", [LAYERWISE], indirect=True)
def test_a_load_says_how_long_a_layer_of_its_step_will_compute(
    store: Store, vllm: ServedVllm
) -> None:
    """How near it comes is tested with layers that take longer, in tests/engines."""
    prompts = [prompt(10 + number, count) for number, count in enumerate(STORED_TOKENS)]
    for tokens in prompts:  # which teaches what steps take
        store_answers(store, vllm, [tokens])
    before = {delivery.request_id for delivery in store.deliveries()}
    for number, (tokens, tail) in enumerate(zip(prompts, TAILS_TOKENS, strict=True)):
        vllm.answer(tokens + prompt(20 + number, tail))
    loads = [one for one in store.deliveries() if one.request_id not in before]
    assert [load.window_source for load in loads] == ["descriptor"] * len(prompts)
    assert all(load.compute_window_s and load.reported_window_s for load in loads)


def test_eight_at_once_that_share_a_beginning_are_answered_as_one_by_one(
    store: Store, vllm: ServedVllm, judge: Judge
) -> None:
    prompts = sharing(100, 8)
    assert store_answers(store, vllm, prompts) == judge.answers(prompts)
    loaded = vllm.loaded_tokens
    assert vllm.answers(prompts) == judge.answers(prompts)
    assert vllm.loaded_tokens - loaded >= loadable_tokens(prompts[-1])


def test_a_store_that_was_restarted_is_found_again(
    store: Store, vllm: ServedVllm, judge: Judge
) -> None:
    tokens = prompt(4, TOKENS)
    store_answers(store, vllm, [tokens])
    with store.away():
        assert vllm.answer(tokens) == judge.answer(tokens)
    assert_found_again(store, vllm, judge, tokens)


def test_a_store_that_is_killed_while_requests_load_costs_no_answer(
    store: Store, vllm: ServedVllm, judge: Judge
) -> None:
    prompts = sharing(200, 4)
    store_answers(store, vllm, prompts)
    printed = len(vllm.log)
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.extend(vllm.answers(prompts)))
    with store.slow(SLOW_GBPS):
        asking.start()
        store.wait_delivering()
        store.server.kill_storage()
        asking.join()
        store.server.restart_storage()
    assert answers == judge.answers(prompts)
    assert "its blocks are computed" in vllm.log[printed:]
    assert_found_again(store, vllm, judge, prompts[0])
    vllm.forget()
    assert vllm.answers(prompts) == judge.answers(prompts)
