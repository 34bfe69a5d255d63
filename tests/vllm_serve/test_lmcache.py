"""`vllm serve` with LMCache's multiprocess mode, and the store behind LMCache's server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm_serve.judge import Judge
from tests.vllm_serve.prompts import prompt
from tests.vllm_serve.served_lmcache import CHUNK_TOKENS, ServedLMCache
from tests.vllm_serve.served_vllm import Engines, Served
from tests.vllm_serve.store import Store, wait_until

pytestmark = pytest.mark.timeout(1800)

BUCKET = "lmcache"


@pytest.fixture
def lmcache(store: Store, tmp_path: Path) -> Iterator[ServedLMCache]:
    served = ServedLMCache(store.lmcache_adapter(BUCKET), tmp_path / "lmcache")
    yield served
    print(served.log[-4000:])
    served.stop()


def test_what_lmcache_has_only_in_the_store_gives_the_answer_that_the_model_computes(
    engines: Engines, store: Store, lmcache: ServedLMCache, model: Path, judge: Judge
) -> None:
    vllm = engines.running(Served(model, lmcache.transfer))
    prompts = [prompt(60, 1500), prompt(61, 700)]
    chunks = sum(len(tokens) // CHUNK_TOKENS for tokens in prompts)
    assert vllm.answers(prompts) == judge.answers(prompts)
    wait_until(lambda: len(store.keys(BUCKET)) == chunks, f"{chunks} chunks to be stored")
    assert vllm.loaded_tokens == 0
    lmcache.forget()
    vllm.forget()
    delivered = store.delivered_count()
    assert vllm.answers(prompts) == judge.answers(prompts)
    assert vllm.loaded_tokens == chunks * CHUNK_TOKENS
    assert store.delivered_count() > delivered
    engines.stop()
