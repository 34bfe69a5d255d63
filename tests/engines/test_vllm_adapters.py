"""LoRA adapters behind vLLM, whose hashes of blocks have an adapter's name and path alone."""

# ruff: noqa: F401, F811 (fixtures of another module)

from __future__ import annotations

import os
from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.engines.test_vllm_connector import StartEngine, configs, prompt, start
from tests.engines.vllm_engine import Engine


def adapter(directory: Path, time_ns: int) -> LoRARequest:
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(b"a" * 100)
    os.utime(weights, ns=(time_ns, time_ns))
    return LoRARequest("sql", 1, str(directory))


def loaded_tokens(engine: Engine, name: str, tokens: list[int], lora: LoRARequest | None) -> int:
    """Run a request; how many of its tokens came from the store."""
    parameters = SamplingParams(max_tokens=1, temperature=0.0)
    parameters.update_from_generation_config({}, eos_token_id=2)
    request = Request(
        name, tokens, parameters, None, lora_request=lora, block_hasher=engine._hasher
    )
    engine.scheduler.add_request(request)
    engine.run()
    engine.saved()
    return engine.loaded_tokens.get(name, 0)


def test_another_adapter_under_the_same_name_and_path_finds_nothing_of_the_first(
    start: StartEngine, tmp_path: Path
) -> None:
    tokens = prompt(300, 100)
    assert loaded_tokens(start(), "first", tokens, adapter(tmp_path, time_ns=1)) == 0
    assert loaded_tokens(start(), "again", tokens, adapter(tmp_path, time_ns=1)) == 96
    assert loaded_tokens(start(), "retrained", tokens, adapter(tmp_path, time_ns=2)) == 0
    assert loaded_tokens(start(), "retrained", tokens, adapter(tmp_path, time_ns=2)) == 96
    assert loaded_tokens(start(), "base", tokens, None) == 0


def test_an_adapter_that_changes_under_a_running_engine_stores_nothing_more(
    start: StartEngine, tmp_path: Path
) -> None:
    engine = start()
    longer = prompt(301, 200)
    loaded_tokens(engine, "first", longer[:100], adapter(tmp_path, time_ns=3))
    # What it computed with the first files is in vLLM's own prefix cache still.
    loaded_tokens(engine, "changed", longer, adapter(tmp_path, time_ns=4))
    assert loaded_tokens(start(), "other", longer, adapter(tmp_path, time_ns=4)) == 0


def test_an_adapter_whose_files_are_not_there_is_served_without_the_store(
    start: StartEngine, tmp_path: Path
) -> None:
    tokens = prompt(302, 100)
    absent = LoRARequest("sql", 1, str(tmp_path / "absent"))
    assert loaded_tokens(start(), "first", tokens, absent) == 0
    assert loaded_tokens(start(), "again", tokens, absent) == 0
