"""`vllm serve` with requests that are parked until their KV is loaded: others go on, and whatever
becomes of the load or of the request, nothing of it stays.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.vllm_serve.judge import Judge
from tests.vllm_serve.prompts import loadable_tokens, prompt
from tests.vllm_serve.served_vllm import Engines, Served, ServedVllm
from tests.vllm_serve.store import Store, wait_until
from tests.vllm_serve.stored_answers import assert_found_again, store_answers

pytestmark = pytest.mark.timeout(1200)

TOKENS = 1500
SLOW_GBPS = 0.02  # 2.5 MB/s: some seconds for a prompt
KILLED_GBPS = 0.008  # 1 MB/s: three seconds for a layer, so that the kill comes between two
HELD_GBPS = 0.001  # minutes for one, unless it is let go
LOAD_TIMEOUT_S = 300.0


@pytest.fixture
def vllm(engines: Engines, store: Store, model: Path) -> ServedVllm:
    """It parks every request that it loads for."""
    transfer = store.connector(
        weights_revision="parked", load_mode="before_schedule", load_timeout_s=LOAD_TIMEOUT_S
    )
    return emptied(engines, Served(model, transfer))


@pytest.fixture
def choosing(engines: Engines, store: Store, model: Path) -> ServedVllm:
    """It chooses for each request."""
    transfer = store.connector(weights_revision="per request", load_mode="per_request")
    return emptied(engines, Served(model, transfer))


def emptied(engines: Engines, served: Served) -> ServedVllm:
    running = engines.running(served)
    running.forget()
    return running


class Asking:
    """A prompt that is asked in a thread of its own."""

    def __init__(self, vllm: ServedVllm, tokens: list[int]) -> None:
        self.answers: list[list[int]] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(vllm.answer(tokens)))
        self._thread.start()

    def answer(self) -> list[int]:
        self._thread.join()
        (answer,) = self.answers
        return answer


def test_others_are_answered_while_a_request_is_parked(
    store: Store, vllm: ServedVllm, judge: Judge
) -> None:
    tokens = prompt(400, TOKENS)
    store_answers(store, vllm, [tokens])
    loaded, parked = vllm.loaded_tokens, vllm.parked_hits
    others = [prompt(410, 300), prompt(411, 40)]
    with store.slow(HELD_GBPS):
        asking = Asking(vllm, tokens)
        store.wait_delivering()
        answers = vllm.answers(others)
        assert store.deliveries()[0].duration_s is None  # which is that of the parked one
        assert asking.answers == []
    assert answers == judge.answers(others)
    assert asking.answer() == judge.answer(tokens)
    assert vllm.loaded_tokens - loaded == loadable_tokens(tokens)
    assert vllm.parked_hits - parked == 1


def test_a_request_whose_client_goes_while_it_is_parked_leaves_nothing(
    store: Store, vllm: ServedVllm, judge: Judge
) -> None:
    tokens = prompt(420, TOKENS)
    others = [prompt(430, 300), prompt(431, 40)]
    store_answers(store, vllm, [tokens])
    with store.slow(HELD_GBPS):
        with vllm.asked(tokens):
            store.wait_delivering()
        vllm.forget()  # which vLLM does when no request holds a block
        wait_until(lambda: store.deliveries()[0].error is not None, "the delivery to be broken off")
        assert vllm.answers(others) == judge.answers(others)
    assert_found_again(store, vllm, judge, tokens)


def test_what_comes_slowly_is_parked_and_computed_when_the_store_is_killed(
    store: Store, choosing: ServedVllm, judge: Judge
) -> None:
    one, two, three = prompts = [prompt(440 + number, TOKENS) for number in range(3)]
    store_answers(store, choosing, prompts)
    with store.slow(SLOW_GBPS):
        assert choosing.answer(one) == judge.answer(one)
        assert choosing.parked_hits == 0  # nothing was loaded before
        assert choosing.answer(two) == judge.answer(two)
        assert choosing.parked_hits == 1
    with store.slow(KILLED_GBPS):
        asking = Asking(choosing, three)
        store.wait_delivering()
        store.server.kill_storage()
        assert asking.answer() == judge.answer(three)
        assert choosing.parked_hits == 2
        store.server.restart_storage()
    assert_found_again(store, choosing, judge, three)
