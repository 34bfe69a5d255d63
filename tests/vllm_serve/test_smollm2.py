"""`vllm serve` with the connector, a model that was trained, and a text that people read."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.vllm_serve.judge import Judge
from tests.vllm_serve.prompts import loadable_tokens
from tests.vllm_serve.served_vllm import Engines, Served
from tests.vllm_serve.smollm2 import write_smollm2
from tests.vllm_serve.store import Store
from tests.vllm_serve.stored_answers import store_answers

pytestmark = pytest.mark.timeout(1800)

README = Path(__file__).parents[2] / "README.md"
TEXT_CHARACTERS = 2500
QUESTIONS = ("What is this text about?", "What is the capital of France?")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("smollm2") / "model")


def chats(smollm2: Path) -> list[list[int]]:
    """Questions about one text, as the model was trained to be asked."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = README.read_text("utf-8")[:TEXT_CHARACTERS]
    prompts: list[list[int]] = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": text}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in QUESTIONS
    ]
    return prompts


def test_questions_about_a_text_are_answered_the_same_from_what_is_stored(
    engines: Engines, store: Store, smollm2: Path
) -> None:
    judge, prompts = Judge(smollm2), chats(smollm2)
    right = judge.answers(prompts)
    assert right[0] != right[1]
    vllm = engines.running(Served(smollm2, store.connector(), tokens_max=2048))
    assert store_answers(store, vllm, prompts) == right
    loaded = vllm.loaded_tokens
    assert vllm.answers(prompts) == right
    assert vllm.loaded_tokens - loaded >= loadable_tokens(prompts[0])
    assert store.deliveries()[0].delivery == "layerwise"
