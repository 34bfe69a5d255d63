"""Steps that several tests take: answers whose blocks are stored, a store that is found again."""

from __future__ import annotations

from collections.abc import Sequence

from tests.vllm_serve.judge import Judge
from tests.vllm_serve.prompts import blocks_of
from tests.vllm_serve.served_vllm import ServedVllm
from tests.vllm_serve.store import Store, wait_until


def store_answers(store: Store, vllm: ServedVllm, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The answers of a vLLM that has to compute them; all their blocks are stored, and vLLM has
    forgotten them.
    """
    before, loaded = store.keys(), vllm.loaded_tokens
    answers = vllm.answers(prompts)
    store.wait_stored(before, vllm.served.ranks * len(blocks_of(prompts)))
    assert vllm.loaded_tokens == loaded
    vllm.forget()
    return answers


def assert_found_again(store: Store, vllm: ServedVllm, judge: Judge, tokens: list[int]) -> None:
    """The store is left alone for a while after it failed; then the prompt is loaded.

    The store is asked what it delivered: vLLM counts loads that failed as well.
    """
    delivered = store.delivered_count()

    def found() -> bool:
        vllm.forget()
        assert vllm.answer(tokens) == judge.answer(tokens)
        return store.delivered_count() > delivered

    wait_until(found, "the store to be asked again")
