"""A `vllm serve` that is started again, without the store at first, and computes in small steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.vllm_serve.judge import Judge
from tests.vllm_serve.load_modes import BEFORE_SCHEDULE, served_in
from tests.vllm_serve.prompts import loadable_tokens, prompt, sharing
from tests.vllm_serve.served_vllm import Engines, ServedVllm
from tests.vllm_serve.store import Store
from tests.vllm_serve.stored_answers import assert_found_again, store_answers

pytestmark = pytest.mark.timeout(1800)

STEP_TOKENS = 96  # three blocks: a prompt takes many steps
LONG = prompt(20, 3000)
PROMPTS = [LONG, *sharing(300, 7)]


@dataclass(frozen=True)
class Restarted:
    """The vLLM that was started second, and what it answered before the store was there."""

    vllm: ServedVllm
    answers_without_store: list[list[int]]


@pytest.fixture(scope="module")
def restarted(engines: Engines, store: Store, model: Path) -> Restarted:
    """One vLLM stored the prompts; the store is away while another one starts, which loads in the
    other mode.
    """
    before = served_in(BEFORE_SCHEDULE, store, model)
    store_answers(store, engines.running(before), PROMPTS)
    after = replace(before, asynchronous=False, step_tokens=STEP_TOKENS)
    with store.away():
        vllm = engines.fresh(after)
        return Restarted(vllm, vllm.answers(PROMPTS))


def test_without_the_store_it_starts_and_answers(restarted: Restarted, judge: Judge) -> None:
    assert restarted.answers_without_store == judge.answers(PROMPTS)


def test_it_loads_what_the_one_before_it_stored(
    restarted: Restarted, store: Store, judge: Judge
) -> None:
    vllm = restarted.vllm
    assert_found_again(store, vllm, judge, LONG)
    vllm.forget()
    loaded = vllm.loaded_tokens
    assert vllm.answer(LONG) == judge.answer(LONG)
    assert vllm.loaded_tokens - loaded == loadable_tokens(LONG)


def test_prompts_that_are_asked_at_once_are_loaded_and_computed_in_small_steps(
    restarted: Restarted, store: Store, judge: Judge
) -> None:
    vllm = restarted.vllm
    assert_found_again(store, vllm, judge, LONG)
    vllm.forget()
    longer = [tokens + prompt(30 + number, 200) for number, tokens in enumerate(PROMPTS)]
    loaded = vllm.loaded_tokens
    assert vllm.answers(longer) == judge.answers(longer)
    assert vllm.loaded_tokens - loaded >= loadable_tokens(LONG)
