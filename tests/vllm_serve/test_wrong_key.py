"""A `vllm serve` whose key the store refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm_serve.judge import Judge
from tests.vllm_serve.prompts import prompt
from tests.vllm_serve.served_vllm import Engines, Served
from tests.vllm_serve.store import Store

pytestmark = pytest.mark.timeout(1200)


def test_with_a_wrong_secret_it_answers_stores_nothing_and_logs_the_code(
    engines: Engines, store: Store, model: Path, judge: Judge, tmp_path: Path
) -> None:
    access_key = store.server.credentials.access_key
    wrong = tmp_path / "credentials"
    wrong.write_text(
        f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {'x' * 40}\n"
    )
    vllm = engines.running(Served(model, store.connector(credentials_file=str(wrong))))
    before, prompts = store.keys(), [prompt(40, 700), prompt(41, 900)]
    assert vllm.answers(prompts) == judge.answers(prompts)
    vllm.forget()
    assert vllm.answers(prompts) == judge.answers(prompts)
    assert vllm.loaded_tokens == 0
    assert store.keys() == before
    assert "SignatureDoesNotMatch" in vllm.log
