"""`vllm serve` with its own offloading connector and the store as that one's second tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm_serve.judge import Judge
from tests.vllm_serve.prompts import blocks_of, loadable_tokens, prompt
from tests.vllm_serve.served_vllm import Engines, Served
from tests.vllm_serve.store import Store

pytestmark = pytest.mark.timeout(1800)

HOST_BYTES = 256 << 20


def test_what_one_vllm_stored_another_one_loads(
    engines: Engines, store: Store, model: Path, judge: Judge
) -> None:
    served = Served(model, store.tier(HOST_BYTES))
    first = engines.running(served)
    before, prompts = store.keys(), [prompt(50, 1500), prompt(51, 700)]
    assert first.answers(prompts) == judge.answers(prompts)
    store.wait_stored(before, len(blocks_of(prompts)))
    second = engines.fresh(served)
    assert second.answers(prompts) == judge.answers(prompts)
    assert second.loaded_tokens == sum(map(loadable_tokens, prompts))
    assert {delivery.delivery for delivery in store.deliveries()[:2]} == {"chunkwise"}
