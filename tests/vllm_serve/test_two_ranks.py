"""`vllm serve` with the connector and two tensor-parallel ranks, each with KV of its own.

Ranks that share a processor take a minute, so this runs only where it is asked for.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.vllm_serve.judge import Judge
from tests.vllm_serve.prompts import loadable_tokens, prompt
from tests.vllm_serve.served_vllm import Engines, Served
from tests.vllm_serve.store import Store
from tests.vllm_serve.stored_answers import store_answers

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("ENGINE_TESTS") != "full",
        reason="takes a minute: ENGINE_TESTS=full make test-engines",
    ),
]


def test_both_ranks_load_what_they_stored(
    engines: Engines, store: Store, model: Path, judge: Judge
) -> None:
    vllm = engines.running(Served(model, store.connector(), ranks=2))
    prompts = [prompt(70, 1500), prompt(71, 700)]
    assert store_answers(store, vllm, prompts) == judge.answers(prompts)
    loaded, delivered = vllm.loaded_tokens, store.delivered_count()
    assert vllm.answers(prompts) == judge.answers(prompts)
    assert vllm.loaded_tokens - loaded == sum(map(loadable_tokens, prompts))
    assert store.delivered_count() - delivered == 2 * len(prompts)
