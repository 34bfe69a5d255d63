"""A Llama with random weights whose answer follows from every token of its prompt.

With weights as they are usually initialised attention is the same for all tokens, the last ones
decide, and an engine that reads wrong KV answers as if it were right. Here queries and keys are
large, so that attention chooses among tokens, and what it brings is large beside a token's own
embedding. Four layers of it carry a change of one token into what is sampled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

VOCABULARY = 1024
WIDTH = 64
SEED = 20_26

_SHARPNESS = 2.4  # of queries and keys
_ATTENDED = 16.0  # how much larger than its input attention's output is


@dataclass(frozen=True)
class Llama:
    """What the model is made of. Every query head has keys of its own, `WIDTH` wide."""

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    inner: int = 512
    tokens_max: int = 8192


SMALL = Llama()


def write_model(directory: Path, model: Llama = SMALL) -> Path:
    """Configuration and float32 weights as vLLM loads them; the same in every run."""
    directory.mkdir()
    document = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "head_dim": WIDTH,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": model.tokens_max,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(document))
    save_file(_weights(model), directory / "model.safetensors", {"format": "pt"})
    return directory


def _weights(model: Llama) -> dict[str, np.ndarray]:
    random = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        values = random.standard_normal((rows, columns), np.float32)
        return values * np.float32(gain / columns**0.5)

    hidden, inner, attended = model.hidden, model.inner, model.heads * WIDTH
    ones = np.ones(hidden, np.float32)
    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden, hidden**0.5),
        "model.norm.weight": ones,
        "lm_head.weight": matrix(VOCABULARY, hidden),
    }
    for layer in range(model.layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones,
            f"{name}.post_attention_layernorm.weight": ones,
            f"{name}.self_attn.q_proj.weight": matrix(attended, hidden, _SHARPNESS),
            f"{name}.self_attn.k_proj.weight": matrix(attended, hidden, _SHARPNESS),
            f"{name}.self_attn.v_proj.weight": matrix(attended, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, attended, _ATTENDED),
            f"{name}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    return weights
