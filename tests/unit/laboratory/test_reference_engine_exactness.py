"""The engine against a float64 transformer written with loops, and against itself."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from objectcache_laboratory.reference_engine.config import ModelConfig
from objectcache_laboratory.reference_engine.engine import (
    RECOMPUTATION_TOLERANCE,
    PrefillResult,
    ReferenceEngine,
    relative_difference,
)
from objectcache_laboratory.reference_engine.kv_chunks import LocalKv, to_chunks
from objectcache_laboratory.reference_engine.weights import LayerWeights, random_weights

TINY = ModelConfig(
    num_layers=3, hidden=24, n_heads=6, n_kv_heads=2, head_dim=8, mlp_hidden=40, seed=7
)
CHUNK_TOKENS = 8
FLOAT32_TOLERANCE = 1e-5  # float32 against float64: rounding alone

Doubles = npt.NDArray[np.float64]


class NaiveTransformer:
    """The same model, one token, one head and one position at a time, in float64."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.weights = random_weights(config)

    def logits(self, tokens: list[int]) -> Doubles:
        rows = [self.weights.embedding[token].astype(np.float64) for token in tokens]
        for layer in self.weights.layers:
            rows = self.layer(layer, rows)
        logits: Doubles = self.norm(rows[-1], self.weights.final_norm) @ self.weights.unembedding
        return logits

    def layer(self, weights: LayerWeights, rows: list[Doubles]) -> list[Doubles]:
        attended = self.attention(weights, [self.norm(x, weights.attention_norm) for x in rows])
        rows = [x + y for x, y in zip(rows, attended, strict=True)]
        return [x + self.mlp(weights, self.norm(x, weights.mlp_norm)) for x in rows]

    def norm(self, x: Doubles, weight: npt.NDArray[np.float32]) -> Doubles:
        return x / math.sqrt(sum(value * value for value in x) / len(x) + 1e-5) * weight

    def mlp(self, weights: LayerWeights, x: Doubles) -> Doubles:
        width = self.config.mlp_hidden
        gate, up = x @ weights.gate_up[:, :width], x @ weights.gate_up[:, width:]
        output: Doubles = (gate / (1 + np.exp(-gate)) * up) @ weights.down
        return output

    def rotate(self, x: Doubles, position: int) -> Doubles:
        half = self.config.head_dim // 2
        rotated = np.empty_like(x)
        for i in range(half):
            angle = position * self.config.rope_theta ** (-2 * i / self.config.head_dim)
            pair = complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
            rotated[i], rotated[i + half] = pair.real, pair.imag
        return rotated

    def attention(self, weights: LayerWeights, rows: list[Doubles]) -> list[Doubles]:
        config, d = self.config, self.config.head_dim
        queries = weights.qkv[:, : config.n_heads * d]
        keys = weights.qkv[:, config.n_heads * d : (config.n_heads + config.n_kv_heads) * d]
        values = weights.qkv[:, (config.n_heads + config.n_kv_heads) * d :]
        outputs: list[Doubles] = []
        for position, row in enumerate(rows):
            heads = []
            for head in range(config.n_heads):
                kv = slice(head * config.n_kv_heads // config.n_heads * d, None)
                kv = slice(kv.start, kv.start + d)
                query = self.rotate(row @ queries[:, head * d : (head + 1) * d], position)
                scores = [
                    query @ self.rotate(rows[seen] @ keys[:, kv], seen) / math.sqrt(d)
                    for seen in range(position + 1)
                ]
                shares = np.exp(np.array(scores) - max(scores))
                shares /= shares.sum()
                heads.append(
                    sum(share * (rows[i] @ values[:, kv]) for i, share in enumerate(shares))
                )
            outputs.append(np.concatenate(heads) @ weights.attention_output)
        return outputs


def random_tokens(count: int, seed: int = 3) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 256, count)


def reuse(
    engine: ReferenceEngine, full: PrefillResult, tokens: npt.NDArray[np.int64], chunks: int
) -> PrefillResult:
    prefix_tokens = chunks * CHUNK_TOKENS
    source = LocalKv(to_chunks(full.kv, CHUNK_TOKENS, 0, chunks))
    return engine.prefill_suffix(source, tokens[prefix_tokens:], prefix_tokens=prefix_tokens)


@pytest.fixture(scope="module")
def engine() -> ReferenceEngine:
    return ReferenceEngine(TINY)


@pytest.mark.parametrize(
    "config", [TINY, ModelConfig(1, 16, 4, 4, 4, 16), ModelConfig(2, 16, 4, 1, 6, 8)]
)
@pytest.mark.parametrize("token_count", [1, 2, 29])
def test_a_prefill_agrees_with_a_float64_transformer_written_with_loops(
    config: ModelConfig, token_count: int
) -> None:
    tokens = random_tokens(token_count)
    expected = NaiveTransformer(config).logits(tokens.tolist())
    logits = ReferenceEngine(config).prefill(tokens).logits
    assert relative_difference(logits, expected.astype(np.float32)) < FLOAT32_TOLERANCE
    assert logits.argmax() == expected.argmax()


def test_reused_kv_agrees_with_a_float64_transformer_written_with_loops(
    engine: ReferenceEngine,
) -> None:
    tokens = random_tokens(37)
    expected = NaiveTransformer(TINY).logits(tokens.tolist()).astype(np.float32)
    result = reuse(engine, engine.prefill(tokens), tokens, chunks=3)
    assert relative_difference(result.logits, expected) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("chunks", [1, 5, 40])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reuse_agrees_with_recomputation_within_the_stated_tolerance(
    chunks: int, seed: int
) -> None:
    engine = ReferenceEngine(ModelConfig(8, 128, 8, 2, 16, 256, seed=seed))
    tokens = random_tokens(331, seed)
    full = engine.prefill(tokens)
    result = reuse(engine, full, tokens, chunks)
    assert relative_difference(result.logits, full.logits) < RECOMPUTATION_TOLERANCE
    assert result.next_token == full.next_token


def test_one_wrong_chunk_moves_the_logits_far_beyond_the_tolerance(engine: ReferenceEngine) -> None:
    tokens = random_tokens(331)
    full = engine.prefill(tokens)
    chunks = to_chunks(full.kv, CHUNK_TOKENS)[:40]
    chunks[17] = chunks[3]
    result = engine.prefill_suffix(LocalKv(chunks), tokens[320:], prefix_tokens=320)
    assert relative_difference(result.logits, full.logits) > 10 * RECOMPUTATION_TOLERANCE


class CopiedLayers:
    """The same bytes as a delivery has them: other memory, layer-major, at an odd address."""

    def __init__(self, chunks: npt.NDArray[np.uint8], offset_bytes: int) -> None:
        count, layers, slice_bytes = chunks.shape
        memory = np.empty(chunks.size + offset_bytes, np.uint8)
        self.payload: npt.NDArray[np.uint8] = memory[offset_bytes:].reshape(
            layers, count, slice_bytes
        )
        self.payload[...] = chunks.transpose(1, 0, 2)

    def wait_layer(self, layer: int) -> npt.NDArray[np.uint8]:
        payload: npt.NDArray[np.uint8] = self.payload[layer]
        return payload


@pytest.mark.parametrize("offset_bytes", [0, 1, 4, 4096])
def test_logits_are_bit_identical_wherever_the_same_kv_lies_in_memory(
    engine: ReferenceEngine, offset_bytes: int
) -> None:
    tokens = random_tokens(331)
    chunks = to_chunks(engine.prefill(tokens).kv, CHUNK_TOKENS)[:33]
    suffix = tokens[33 * CHUNK_TOKENS :]
    prefix_tokens = 33 * CHUNK_TOKENS
    local = engine.prefill_suffix(LocalKv(chunks), suffix, prefix_tokens=prefix_tokens)
    other = engine.prefill_suffix(
        CopiedLayers(chunks, offset_bytes), suffix, prefix_tokens=prefix_tokens
    )
    assert other.logits.tobytes() == local.logits.tobytes()
    assert other.kv.keys.tobytes() == local.kv.keys.tobytes()
    assert other.kv.values.tobytes() == local.kv.values.tobytes()


def test_attention_in_many_blocks_agrees_with_attention_in_one(
    monkeypatch: pytest.MonkeyPatch, engine: ReferenceEngine
) -> None:
    tokens = random_tokens(100)
    expected = engine.prefill(tokens).logits
    monkeypatch.setattr("objectcache_laboratory.reference_engine.attention.QUERY_BLOCK_MAX", 7)
    monkeypatch.setattr("objectcache_laboratory.reference_engine.attention.QUERY_BLOCK_MIN", 1)
    assert relative_difference(engine.prefill(tokens).logits, expected) < RECOMPUTATION_TOLERANCE


def test_greedy_answers_after_reuse_and_after_recomputation_are_the_same(
    engine: ReferenceEngine,
) -> None:
    tokens = random_tokens(100)
    full = engine.prefill(tokens)
    result = reuse(engine, full, tokens, chunks=11)
    assert result.next_token == full.next_token
    first = [full.next_token]
    assert engine.decode(result.kv, first, 20) == engine.decode(full.kv, first, 20)


def test_decoding_feeds_each_token_on_top_of_the_kv_before_it(engine: ReferenceEngine) -> None:
    tokens = random_tokens(50)
    result = engine.prefill(tokens)
    answer = [result.next_token, *engine.decode(result.kv, [result.next_token], 5)]
    for length in range(1, 6):
        again = engine.prefill(np.concatenate([tokens, answer[:length]]))
        assert again.next_token == answer[length]
    assert result.kv.length == 55
    np.testing.assert_allclose(result.kv.keys[:, :, :55], again.kv.keys, rtol=0, atol=1e-4)
