"""Prompts of the reference engine: the KV of their beginnings is stored, the rest is computed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from objectcache_laboratory.reference_engine.config import VOCABULARY, ModelConfig
from objectcache_laboratory.reference_engine.engine import ReferenceEngine
from objectcache_laboratory.reference_engine.kv_chunks import LocalKv, to_chunks

CHUNK_TOKENS = 16
SUFFIX_TOKENS = 8
PROMPTS_KEPT = 64  # each with its KV


@dataclass(frozen=True, slots=True)
class PromptShape:
    """A model of so many layers, whose slices have 32 KiB, and prompts with so many chunks."""

    num_layers: int
    chunk_count: int

    @property
    def model(self) -> ModelConfig:
        """As narrow as attention allows: links are measured, and no processor."""
        return ModelConfig(
            num_layers=self.num_layers, hidden=64, n_heads=4, n_kv_heads=4, mlp_hidden=128
        )

    @property
    def layer_bytes(self) -> int:
        """Of one layer of a prefix."""
        return self.chunk_count * self.model.slice_bytes(CHUNK_TOKENS)

    @property
    def payload_bytes(self) -> int:
        """Of a prefix."""
        return self.num_layers * self.layer_bytes

    @property
    def prefix_tokens(self) -> int:
        """Whose KV is stored."""
        return self.chunk_count * CHUNK_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What a prompt must come to: the KV of its prefix, and the logits behind its last token."""

    prefix: bytes
    suffix: bytes
    chunks: npt.NDArray[np.uint8]  # [chunk_count, num_layers, S]
    logits: npt.NDArray[np.float32]


@lru_cache(PROMPTS_KEPT)
def prompt_of(shape: PromptShape, number: int) -> Prompt:
    """The prompt of a number, computed in full."""
    engine = ReferenceEngine(shape.model)
    drawn = np.random.default_rng([shape.num_layers, shape.chunk_count, number])
    tokens = drawn.integers(0, VOCABULARY, shape.prefix_tokens + SUFFIX_TOKENS, np.uint8).tobytes()
    prefix, suffix = tokens[: shape.prefix_tokens], tokens[shape.prefix_tokens :]
    chunks = to_chunks(engine.prefill(prefix).kv, CHUNK_TOKENS)
    reused = engine.prefill_suffix(LocalKv(chunks), suffix, prefix_tokens=shape.prefix_tokens)
    return Prompt(prefix, suffix, chunks, reused.logits)
