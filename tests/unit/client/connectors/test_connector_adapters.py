"""LoRA adapters in keys: what is in their files, and not their names alone."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from objectcache.connectors.identity import adapters as adapters_module
from objectcache.connectors.identity.adapters import NO_ADAPTER, Adapters
from objectcache.connectors.sglang.served_model import identity_of
from objectcache_schemas.errors import InvalidRequest
from tests.unit.client.connectors.vllm.test_vllm_scheduling import (
    Asked,
    Tables,
    request_of,
    side_of,
    tokens_once_known,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def adapter(directory: Path, byte: bytes = b"a", time_ns: int = 1) -> Path:
    """An adapter's files, written at this time."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (directory / name).write_bytes(byte * 100)
        os.utime(directory / name, ns=(time_ns, time_ns))
    return directory


def lora(path: object, name: str = "sql") -> Any:
    """As vLLM's `LoRARequest`."""
    return SimpleNamespace(lora_name=name, lora_path=str(path))


# --- one engine's adapters ---


def test_an_adapters_revision_is_that_of_its_files_in_every_process(tmp_path: Path) -> None:
    adapters = Adapters({})
    assert adapters.revision_of(None) == NO_ADAPTER
    first = adapters.revision_of(lora(adapter(tmp_path / "one")))
    assert first
    assert adapters.revision_of(lora(tmp_path / "one")) == first
    assert Adapters({}).revision_of(lora(tmp_path / "one")) == first
    other = adapters.revision_of(lora(adapter(tmp_path / "two", time_ns=2)))
    assert other not in (None, NO_ADAPTER, first)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_changes_in_place_is_left_alone_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    adapters = Adapters({})
    first = adapters.revision_of(lora(adapter(tmp_path)))
    os.utime(tmp_path / name, ns=(2, 2))
    assert adapters.revision_of(lora(tmp_path)) is None
    adapter(tmp_path)  # as before, but the engine may have loaded the other in between
    assert adapters.revision_of(lora(tmp_path)) is None
    assert len(caplog.messages) == 1
    assert "sql" in caplog.text
    assert Adapters({}).revision_of(lora(tmp_path)) == first


def test_an_adapter_without_files_is_left_alone_until_it_has_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapters = Adapters({"HF_HUB_CACHE": str(tmp_path)})
    assert adapters.revision_of(lora("org/adapter")) is None
    assert adapters.revision_of(lora("org/adapter")) is None
    assert len(caplog.messages) == 1
    adapter(tmp_path / "models--org--adapter" / "snapshots" / COMMIT)
    assert adapters.revision_of(lora("org/adapter")) == f"commit {COMMIT}"


def test_no_more_adapters_are_remembered_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_module, "ADAPTERS_MAX", 1)
    adapters = Adapters({})
    assert adapters.revision_of(lora(adapter(tmp_path))) is not None
    assert adapters.revision_of(lora(tmp_path, "another")) is None
    assert adapters.revision_of(lora(tmp_path)) is not None


# --- vLLM's scheduler ---


def test_keys_of_a_request_with_an_adapter_hold_the_adapters_files(tmp_path: Path) -> None:
    def keys_and_weights(lora_request: Any) -> tuple[tuple[str, ...], set[str]]:
        """What is asked for, and under which weights KV is loaded and saved."""
        store = Asked()
        store.matched = 2
        side = side_of(store)
        request = request_of(blocks=3, tokens=50)
        request.lora_request = lora_request
        side.arrived(request)
        assert tokens_once_known(side, request, 0) == 32
        side.allocated(request, [100, 101, 102, 103], 32)
        request.num_computed_tokens = 32
        plan = side.plan({"r": 18}, Tables())
        side.close()
        assert plan.loads
        assert plan.saves
        weights = {load.weights for load in plan.loads} | {save.weights for save in plan.saves}
        return tuple(store.keys[0]), weights

    plain, plain_weights = keys_and_weights(None)
    first, first_weights = keys_and_weights(lora(adapter(tmp_path)))
    again, _ = keys_and_weights(lora(tmp_path))
    other, other_weights = keys_and_weights(lora(adapter(tmp_path, time_ns=2)))
    assert first == again
    assert len({plain, first, other}) == 3
    assert [len(weights) for weights in (plain_weights, first_weights, other_weights)] == [1] * 3
    assert len(plain_weights | first_weights | other_weights) == 3


def test_kv_of_an_adapter_without_a_revision_is_neither_asked_for_nor_saved(
    tmp_path: Path,
) -> None:
    store = Asked()
    store.matched = 3
    side = side_of(store)
    request = request_of(blocks=3, tokens=50)
    request.lora_request = lora(tmp_path / "absent")
    side.arrived(request)
    assert side.matched_tokens(request, 0) == 0
    side.allocated(request, [100, 101, 102, 103], 0)
    plan = side.plan({"r": 50}, Tables())
    side.close()
    assert (store.keys, plan.loads, plan.saves) == ([], (), ())


# --- SGLang's arguments ---


def sglang_identity(lora_paths: Any, **arguments: Any) -> Any:
    server_args = SimpleNamespace(model_path="org/model", lora_paths=lora_paths, **arguments)
    return identity_of(server_args, "r1", {"HF_HOME": "/nowhere"})


def test_the_files_of_sglangs_adapters_are_part_of_its_keys(tmp_path: Path) -> None:
    plain = sglang_identity(None)
    assert sglang_identity([]) == plain
    path = str(adapter(tmp_path))
    forms: list[Any] = [
        [SimpleNamespace(lora_name="sql", lora_path=path)],
        [f"sql={path}"],
        [{"lora_name": "sql", "lora_path": path}],
        {"sql": path},
    ]
    first = sglang_identity(forms[0])
    assert all(sglang_identity(form) == first for form in forms)
    assert sglang_identity(forms[0], enable_lora=False) == plain
    adapter(tmp_path, time_ns=2)
    assert len({plain, first, sglang_identity(forms[0])}) == 3


def test_an_adapter_of_sglang_whose_files_are_not_known_stops_it_by_its_name(
    tmp_path: Path,
) -> None:
    with pytest.raises(InvalidRequest, match=r"adapter 'sql' .* --lora-paths"):
        sglang_identity([f"sql={tmp_path / 'absent'}"])
