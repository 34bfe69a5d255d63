"""A model's configuration as one short text: equal for models that compute the same KV."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast

DIGEST_CHARS = 32  # 128 bits
# Of a Hugging Face configuration: names, and what decoding or training alone looks at.
_WITHOUT_EFFECT = frozenset(
    (
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "use_cache",
        "id2label",
        "label2id",
        "problem_type",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "generation_config",
        "task_specific_params",
    )
)


def configuration_digest(configuration: Any, options: Mapping[str, object] | None = None) -> str:
    """Digest of what the engine loaded the model with: 32 hex digits.

    `configuration` is a mapping or an object with `to_dict`, such as a Hugging Face configuration:
    architecture, rope scaling and theta, sliding window, quantisation and whatever else it has.
    All of it counts but names and what decoding alone looks at, so a field that nobody thought of
    makes a miss and never wrong KV. `options` are the engine's own on top of it. A field that is
    None counts as absent.
    """
    document = [_plain(configuration), _plain(dict(options or {}))]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def _plain(value: Any) -> Any:
    """The value in JSON's types, the same in every process."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in cast(list[Any], value)]
    if isinstance(value, set | frozenset):
        return sorted(str(entry) for entry in cast(set[Any], value))
    text = str(value)  # torch.bfloat16, say
    return type(value).__name__ if " at 0x" in text else text


def _mapping(values: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        str(name): _plain(value)
        for name, value in values.items()
        if value is not None and name not in _WITHOUT_EFFECT
    }
