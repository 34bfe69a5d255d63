"""Prefill, prefill on top of a prefix's KV, and greedy decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from objectcache_laboratory.reference_engine.arithmetic import (
    RotaryEmbedding,
    rms_norm,
    rotate,
    swiglu_mlp,
)
from objectcache_laboratory.reference_engine.attention import causal_attention
from objectcache_laboratory.reference_engine.config import VOCABULARY, ModelConfig
from objectcache_laboratory.reference_engine.kv_cache import KvCache
from objectcache_laboratory.reference_engine.kv_chunks import KvSource, load_layer
from objectcache_laboratory.reference_engine.timeline import LayerTiming
from objectcache_laboratory.reference_engine.weights import LayerWeights, random_weights
from objectcache_schemas.errors import InvalidRequest

Array = npt.NDArray[np.float32]
Tokens = Sequence[int] | npt.NDArray[np.integer] | bytes

# Largest `relative_difference` between the logits of reuse and those of full recomputation. They
# are not bit-identical: matrix products of other shapes add the same float32 terms in another
# order, which rounds differently by about 1e-7 a layer. Measured: 6e-7 at most, over 27 geometries
# and lengths; one wrong chunk of 43 makes 8e-3 or more.
RECOMPUTATION_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prefill leaves behind."""

    logits: Array  # float32[vocabulary], of the last position
    kv: KvCache  # of all tokens, the prefix included
    timeline: tuple[LayerTiming, ...]

    @property
    def next_token(self) -> int:
        """The greedy choice."""
        return int(self.logits.argmax())


def relative_difference(logits: Array, reference: Array) -> float:
    """Largest absolute difference, as a part of the reference's largest absolute logit."""
    return float(np.abs(logits - reference).max() / np.abs(reference).max())


class ReferenceEngine:
    """The reference model with its weights. Not for several threads at once."""

    def __init__(self, config: ModelConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self.config = config
        self._clock = clock
        self._weights = random_weights(config)
        self._rotary = RotaryEmbedding(config.head_dim, config.rope_theta)

    def prefill(self, tokens: Tokens) -> PrefillResult:
        """Compute a whole prompt. Raises `InvalidRequest` if it is empty or no byte tokens."""
        ids = token_ids(tokens)
        return self._prefill(ids, KvCache.empty(self.config, ids.size), None)

    def prefill_suffix(
        self, source: KvSource, suffix_tokens: Tokens, *, prefix_tokens: int
    ) -> PrefillResult:
        """Compute only the tokens that follow a prefix whose KV `source` has.

        Layer l computes as soon as its own KV is there, while `source` receives the next layers.
        Raises what `source` raises; `InvalidRequest` if a layer holds not exactly `prefix_tokens`
        tokens, as after a delivery that was truncated.
        """
        ids = token_ids(suffix_tokens)
        kv = KvCache.empty(self.config, prefix_tokens + ids.size)
        kv.length = prefix_tokens
        return self._prefill(ids, kv, _Prefix(source, prefix_tokens, self.config.slice_bytes(1)))

    def decode(self, kv: KvCache, tokens: Tokens, count: int) -> list[int]:
        """Feed `tokens` after those in `kv`, then generate `count` tokens greedily.

        `kv` gains everything that was fed: afterwards it lacks only the last generated token.
        """
        fed = token_ids(tokens)
        kv.reserve(kv.length + fed.size + count)
        generated: list[int] = []
        for _ in range(count):
            generated.append(self._prefill(fed, kv, None).next_token)
            fed = np.array(generated[-1:])
        return generated

    def _prefill(
        self, ids: npt.NDArray[np.intp], kv: KvCache, prefix: _Prefix | None
    ) -> PrefillResult:
        x = self._weights.embedding[ids]
        factors = self._rotary.factors(kv.length, ids.size)
        timings = [
            self._timed_layer(layer, x, kv, factors, prefix)
            for layer in range(self.config.num_layers)
        ]
        kv.length += ids.size
        last = rms_norm(x[-1], self._weights.final_norm)
        return PrefillResult(last @ self._weights.unembedding, kv, tuple(timings))

    def _timed_layer(
        self,
        layer: int,
        x: Array,
        kv: KvCache,
        factors: tuple[Array, Array],
        prefix: _Prefix | None,
    ) -> LayerTiming:
        wait_start_s = self._clock()
        payload = None if prefix is None else prefix.wait_layer(layer)
        ready_s = self._clock()
        if payload is not None:
            load_layer(kv, layer, payload)
        compute_start_s = self._clock()
        self._run_layer(layer, x, kv, factors)
        return LayerTiming(layer, wait_start_s, ready_s, compute_start_s, self._clock())

    def _run_layer(self, layer: int, x: Array, kv: KvCache, factors: tuple[Array, Array]) -> None:
        """Advance `x`, float32[tokens, hidden], by one layer in place."""
        weights = self._weights.layers[layer]
        x += self._attention(layer, weights, rms_norm(x, weights.attention_norm), kv, factors)
        x += swiglu_mlp(rms_norm(x, weights.mlp_norm), weights.gate_up, weights.down)

    def _attention(
        self,
        layer: int,
        weights: LayerWeights,
        x: Array,
        kv: KvCache,
        factors: tuple[Array, Array],
    ) -> Array:
        queries, keys, values = self._project(weights, x)
        kv.write(layer, kv.length, rotate(keys, factors), values)
        queries = rotate(queries, factors)
        queries *= np.float32(self.config.head_dim**-0.5)
        rows = slice(0, kv.length + x.shape[0])
        attended = causal_attention(
            queries, kv.keys[layer, :, rows], kv.values[layer, :, rows], kv.length
        )
        output: Array = attended.reshape(x.shape[0], -1) @ weights.attention_output
        return output

    def _project(self, weights: LayerWeights, x: Array) -> list[Array]:
        """Queries, keys and values, each float32[tokens, its heads, head_dim]."""
        config = self.config
        heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        projected = (x @ weights.qkv).reshape(x.shape[0], sum(heads), config.head_dim)
        ends = np.cumsum((0, *heads)).tolist()
        return [projected[:, start:end] for start, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A source, and how much each of its layers must hold."""

    source: KvSource
    tokens: int
    layer_token_bytes: int

    def wait_layer(self, layer: int) -> npt.NDArray[np.uint8]:
        payload = self.source.wait_layer(layer)
        _, slice_bytes = payload.shape
        if slice_bytes % self.layer_token_bytes:
            raise InvalidRequest(
                f"layer {layer} has slices of {slice_bytes} bytes, "
                f"not a multiple of {self.layer_token_bytes} bytes a token"
            )
        if payload.size != self.tokens * self.layer_token_bytes:
            raise InvalidRequest(
                f"layer {layer} holds {payload.size // self.layer_token_bytes} tokens, "
                f"the prefix has {self.tokens}"
            )
        return payload


def token_ids(tokens: Tokens) -> npt.NDArray[np.intp]:
    """Byte tokens as an index array; raises `InvalidRequest` for none, or one over 255."""
    ids = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.asarray(tokens)
    if not ids.size:
        raise InvalidRequest("tokens must not be empty")
    if ids.min() < 0 or ids.max() >= VOCABULARY:
        raise InvalidRequest(f"tokens must be bytes, 0 to {VOCABULARY - 1}")
    return ids.astype(np.intp)
