"""Seeded random weights, scaled so that activations keep their size from layer to layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectcache_laboratory.reference_engine.config import VOCABULARY, ModelConfig

Array = npt.NDArray[np.float32]

# Queries and keys this much longer than unit variance make attention select among tokens. With 1 it
# is nearly a mean over the prefix, which would hide a wrong chunk of KV.
ATTENTION_GAIN = 1.5


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Matrices multiply row vectors from the right: `x @ w`."""

    attention_norm: Array  # [hidden]
    qkv: Array  # [hidden, (n_heads + 2 n_kv_heads) head_dim]: queries, keys, values
    attention_output: Array  # [n_heads head_dim, hidden]
    mlp_norm: Array  # [hidden]
    gate_up: Array  # [hidden, 2 mlp_hidden]: gate, up
    down: Array  # [mlp_hidden, hidden]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model."""

    embedding: Array  # [vocabulary, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # [hidden]
    unembedding: Array  # [hidden, vocabulary]


def random_weights(config: ModelConfig) -> Weights:
    """The weights that `config.seed` names; the same on every machine with the same numpy."""
    random = np.random.Generator(np.random.PCG64(config.seed))
    return Weights(
        embedding=_normal(random, VOCABULARY, config.hidden, 1.0),
        layers=tuple(_layer(random, config) for _ in range(config.num_layers)),
        final_norm=_norm(random, config.hidden),
        unembedding=_normal(random, config.hidden, VOCABULARY, config.hidden**-0.5),
    )


def _layer(random: np.random.Generator, config: ModelConfig) -> LayerWeights:
    hidden, mlp_hidden = config.hidden, config.mlp_hidden
    query_width = config.n_heads * config.head_dim
    kv_width = config.n_kv_heads * config.head_dim
    residual = 1 / math.sqrt(2 * config.num_layers)  # 2 L branches add up to unit variance
    qkv = _normal(random, hidden, query_width + 2 * kv_width, hidden**-0.5)
    qkv[:, : query_width + kv_width] *= ATTENTION_GAIN
    return LayerWeights(
        attention_norm=_norm(random, hidden),
        qkv=qkv,
        attention_output=_normal(random, query_width, hidden, residual * query_width**-0.5),
        mlp_norm=_norm(random, hidden),
        gate_up=_normal(random, hidden, 2 * mlp_hidden, hidden**-0.5),
        down=_normal(random, mlp_hidden, hidden, residual * mlp_hidden**-0.5),
    )


def _normal(random: np.random.Generator, rows: int, columns: int, deviation: float) -> Array:
    weights = random.standard_normal((rows, columns), dtype=np.float32)
    weights *= np.float32(deviation)
    return weights


def _norm(random: np.random.Generator, width: int) -> Array:
    return random.uniform(0.5, 1.5, width).astype(np.float32)
