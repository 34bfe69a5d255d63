"""Names of stored KV: what makes two engines' bytes differ, and what tells one set of weights from
another.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from objectcache.connectors.identity.configuration_digest import configuration_digest
from objectcache.connectors.identity.model_identity import ModelIdentity, identify
from objectcache.connectors.identity.namespace import KvNamespace

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "_name_or_path": "/models/a",
    "transformers_version": "5.23.0",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "fedcba9876543210fedcba9876543210fedcba98"


class HubConfiguration:
    """What of a Hugging Face configuration is looked at."""

    def __init__(self, values: dict[str, Any], commit: str | None = None) -> None:
        self._values = values
        self._commit_hash = commit

    def to_dict(self) -> dict[str, Any]:
        return self._values


# --- the configuration ---


@pytest.mark.parametrize(
    "other",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_theta": 10000.0},
        {"architectures": ["MistralForCausalLM"]},
        {"sliding_window": 4096},
        {"quantization_config": {"quant_method": "fp8"}},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_whatever_changes_in_a_configuration_changes_its_digest(other: dict[str, Any]) -> None:
    assert configuration_digest({**LLAMA, **other}) != configuration_digest(LLAMA)


def test_names_versions_order_and_absent_fields_do_not_change_a_digest() -> None:
    absent = {name: value for name, value in LLAMA.items() if value is not None}
    others = [
        {**LLAMA, "_name_or_path": "/models/b", "transformers_version": "5.24.0"},
        dict(reversed(LLAMA.items())),
        absent,
        {**LLAMA, "architectures": ("LlamaForCausalLM",)},
        {**LLAMA, "eos_token_id": [1, 2]},
    ]
    assert {configuration_digest(other) for other in others} == {configuration_digest(LLAMA)}
    assert configuration_digest(HubConfiguration(LLAMA)) == configuration_digest(LLAMA)


def test_options_of_the_engine_are_part_of_the_digest_and_absent_ones_are_not() -> None:
    plain = configuration_digest(LLAMA)
    assert configuration_digest(LLAMA, {"quantization": "fp8"}) != plain
    assert configuration_digest(LLAMA, {"quantization": None}) == plain
    nested = {"text_config": {"rope_theta": 1.0}}
    assert configuration_digest(nested) != configuration_digest({"text_config": {}})


def test_values_that_json_lacks_have_the_same_digest_in_every_process() -> None:
    class Opaque:
        pass

    first, second = ({"a": Opaque(), "b": {1, 2, 3}} for _ in range(2))
    assert configuration_digest(first) == configuration_digest(second)
    assert configuration_digest({"b": {1, 2}}) != configuration_digest({"b": {1, 3}})


# --- the weights ---


def identity(model: object, given: str = "", **more: Any) -> ModelIdentity:
    environment = more.pop("environment", {"HF_HOME": "/nowhere"})
    return identify(str(model), given, environment, **more)


def weights(directory: Path, byte: bytes = b"a", name: str = "model.safetensors") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_bytes(byte * 100)
    os.utime(directory / name, ns=(1, 1))
    return directory


def test_a_revision_that_is_given_is_taken_as_it_is(tmp_path: Path) -> None:
    assert identity(weights(tmp_path), "r7").weights_revision == "r7"
    assert identity("org/model", "r7", revision="main").weights_revision == "r7"


def test_a_commit_of_the_configuration_or_of_a_snapshots_path_is_the_revision(
    tmp_path: Path,
) -> None:
    configuration = HubConfiguration(LLAMA, COMMIT)
    by_configuration = identity("org/model", configuration=configuration)
    by_path = identity(weights(tmp_path / "models--org--model" / "snapshots" / COMMIT))
    assert by_configuration.weights_revision == by_path.weights_revision == f"commit {COMMIT}"


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_a_name_of_the_hub_is_resolved_by_its_cache(tmp_path: Path, variable: str) -> None:
    hub = {
        "HF_HUB_CACHE": tmp_path,
        "HF_HOME": tmp_path / "hub",
        "XDG_CACHE_HOME": tmp_path / "huggingface" / "hub",
    }[variable]
    stored = hub / "models--org--model"
    weights(stored / "snapshots" / COMMIT)
    (stored / "snapshots" / COMMIT / "config.json").write_text('{"rope_theta": 1.0}')
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    environment = {variable: str(tmp_path)}
    found = identity("org/model", environment=environment)
    assert found.weights_revision == f"commit {COMMIT}"
    assert found.configuration == configuration_digest({"rope_theta": 1.0})
    assert identity("org/model", environment=environment, revision=COMMIT) == found
    other = identity("org/model", environment=environment, revision="v2")
    assert other.weights_revision == "unresolved v2"


def test_of_several_versions_in_the_hubs_cache_one_is_taken_only_where_it_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = tmp_path / "models--org--model"
    weights(stored / "snapshots" / COMMIT)
    (stored / "snapshots" / "no commit").mkdir()
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    environment = {"HF_HUB_CACHE": str(tmp_path)}

    def revision_of(revision: str | None) -> str:
        return identity("org/model", environment=environment, revision=revision).weights_revision

    assert revision_of(None) == revision_of("main") == f"commit {COMMIT}"
    weights(stored / "snapshots" / OTHER_COMMIT)
    (stored / "refs" / "v2").write_text(OTHER_COMMIT)
    assert revision_of("main") == f"commit {COMMIT}"
    assert revision_of("v2") == f"commit {OTHER_COMMIT}"
    assert "weights_revision" not in caplog.text
    assert revision_of(None) == "unresolved"
    assert "weights_revision" in caplog.text


def test_a_configuration_of_another_repository_tells_nothing_of_the_weights(
    tmp_path: Path,
) -> None:
    stored = tmp_path / "models--org--model"
    weights(stored / "snapshots" / COMMIT)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    other = HubConfiguration(LLAMA, OTHER_COMMIT)

    def revision_of(hub: Path, of_weights: bool) -> str:
        environment = {"HF_HUB_CACHE": str(hub)}
        return identity(
            "org/model",
            environment=environment,
            revision="main",
            configuration=other,
            configuration_of_weights=of_weights,
        ).weights_revision

    assert revision_of(tmp_path, of_weights=False) == f"commit {COMMIT}"
    assert revision_of(tmp_path / "empty", of_weights=False) == "unresolved main"
    assert revision_of(tmp_path / "empty", of_weights=True) == f"commit {OTHER_COMMIT}"
    # A branch that has moved since the configuration was read: neither alone is right for sure.
    both = revision_of(tmp_path, of_weights=True)
    assert COMMIT in both
    assert OTHER_COMMIT in both


def test_weights_written_over_others_are_another_revision(tmp_path: Path) -> None:
    before = identity(weights(tmp_path)).weights_revision
    assert identity(tmp_path).weights_revision == before
    (tmp_path / "README.md").write_text("nothing that counts")
    assert identity(tmp_path).weights_revision == before
    (tmp_path / "model.safetensors").write_bytes(b"b" * 100)  # the same size at another time
    rewritten = identity(tmp_path).weights_revision
    (tmp_path / "model-00002.safetensors").write_bytes(b"")
    more = identity(tmp_path).weights_revision
    (tmp_path / "modeling_own.py").write_text("class Attention: ...")
    assert len({before, rewritten, more, identity(tmp_path).weights_revision}) == 4


def test_the_index_of_weights_counts_by_its_content(tmp_path: Path) -> None:
    index = "model.safetensors.index.json"
    revisions = {
        identity(weights(tmp_path, byte, index)).weights_revision for byte in (b"a", b"b", b"a")
    }
    assert len(revisions) == 2


def test_weights_that_nothing_tells_of_are_warned_of_by_the_settings_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert identity("prod").weights_revision == "unresolved"
        assert identity(tmp_path).weights_revision == "unresolved"  # a directory without weights
        identity("prod", "r7")
    assert len(caplog.messages) == 2
    assert all("weights_revision" in message for message in caplog.messages)
    assert "prod" in caplog.messages[0]


# --- keys ---


def test_namespaces_of_models_that_differ_in_their_configuration_alone_differ() -> None:
    plain = KvNamespace("m", "r", "bf16", "l", "h", configuration=configuration_digest(LLAMA))
    scaled = KvNamespace(
        "m", "r", "bf16", "l", "h", configuration=configuration_digest({**LLAMA, "rope_theta": 1})
    )
    assert plain.prefix != scaled.prefix
    assert plain.prefix.startswith("m/")
