from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from objectcache_laboratory.reference_engine.config import ModelConfig
from objectcache_laboratory.reference_engine.engine import ReferenceEngine
from objectcache_laboratory.reference_engine.kv_cache import KvCache
from objectcache_laboratory.reference_engine.kv_chunks import (
    LocalKv,
    load_layer,
    to_chunks,
)
from objectcache_schemas.errors import InvalidRequest

CONFIG = ModelConfig(num_layers=3, hidden=16, n_heads=4, n_kv_heads=2, head_dim=4, mlp_hidden=24)
CHUNK_TOKENS = 5


def filled_cache(tokens: int, capacity: int) -> KvCache:
    """A cache in which every number tells where it belongs."""
    kv = KvCache.empty(CONFIG, capacity)
    kv.keys[...] = np.arange(kv.keys.size, dtype=np.float32).reshape(kv.keys.shape)
    kv.values[...] = -kv.keys - 1
    kv.length = tokens
    return kv


class Clock:
    """Counts its readings."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class RecordingSource:
    """Notes at which reading of the clock each layer was asked for."""

    def __init__(self, chunks: npt.NDArray[np.uint8], clock: Clock) -> None:
        self.local = LocalKv(chunks)
        self.clock = clock
        self.asked: list[tuple[int, float]] = []

    def wait_layer(self, layer: int) -> npt.NDArray[np.uint8]:
        self.asked.append((layer, self.clock.now_s))
        return self.local.wait_layer(layer)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("num_layers", {"num_layers": 0}),
        ("n_heads", {"n_heads": 6, "n_kv_heads": 4}),
        ("head_dim", {"head_dim": 5}),
        ("rope_theta", {"rope_theta": 1.0}),
    ],
)
def test_a_config_that_makes_no_model_is_refused_by_name(
    field: str, values: dict[str, int]
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        ModelConfig(**values)


def test_the_layout_states_the_slice_bytes_of_keys_and_values_in_float32() -> None:
    layout = CONFIG.kv_layout(CHUNK_TOKENS)
    assert layout.num_layers == 3
    assert layout.per_layer_chunk_bytes == 2 * 5 * 2 * 4 * 4
    assert layout.dtype == "float32"


def test_models_that_compute_other_kv_have_other_fingerprints() -> None:
    configs = [
        CONFIG,
        replace(CONFIG, seed=1),
        replace(CONFIG, rope_theta=5e5),
        replace(CONFIG, mlp_hidden=25),
        replace(CONFIG, n_heads=2),
        replace(CONFIG, hidden=8),
    ]
    fingerprints = {config.fingerprint() for config in configs}
    assert len(fingerprints) == len(configs)


def test_the_same_seed_gives_the_same_logits_and_another_seed_others() -> None:
    tokens = b"the same words"
    logits = [
        ReferenceEngine(ModelConfig(2, 16, 2, 1, 8, 16, seed)).prefill(tokens).logits
        for seed in (4, 4, 5)
    ]
    assert np.array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], logits[2])


def test_a_slice_holds_keys_then_values_by_token_then_head() -> None:
    kv = filled_cache(tokens=13, capacity=20)
    chunks = to_chunks(kv, CHUNK_TOKENS)
    assert chunks.shape == (2, 3, CONFIG.slice_bytes(CHUNK_TOKENS))
    slices = chunks.view(np.float32).reshape(2, 3, 2, CHUNK_TOKENS, 2, 4)
    for chunk, layer, token, head in [(0, 0, 0, 0), (1, 2, 3, 1), (0, 1, 4, 0)]:
        position = chunk * CHUNK_TOKENS + token
        assert np.array_equal(slices[chunk, layer, 0, token, head], kv.keys[layer, head, position])
        assert np.array_equal(
            slices[chunk, layer, 1, token, head], kv.values[layer, head, position]
        )


def test_chunks_and_kv_are_each_others_inverse() -> None:
    kv = filled_cache(tokens=15, capacity=15)
    chunks = to_chunks(kv, CHUNK_TOKENS)
    back = KvCache.empty(CONFIG, 15)
    for layer in range(CONFIG.num_layers):
        load_layer(back, layer, chunks[:, layer])
    assert np.array_equal(back.keys, kv.keys)
    assert np.array_equal(back.values, kv.values)


def test_a_selection_of_chunks_equals_that_part_of_all() -> None:
    kv = filled_cache(tokens=23, capacity=30)
    everything = to_chunks(kv, CHUNK_TOKENS)
    assert everything.shape[0] == 4
    assert np.array_equal(to_chunks(kv, CHUNK_TOKENS, 1, 3), everything[1:3])
    assert np.array_equal(to_chunks(kv, CHUNK_TOKENS, first_chunk=2), everything[2:])
    assert to_chunks(kv, CHUNK_TOKENS, first_chunk=4).shape[0] == 0


def test_a_suffix_leaves_the_kv_of_the_whole_prompt() -> None:
    engine = ReferenceEngine(CONFIG)
    tokens = np.arange(23)
    full = engine.prefill(tokens)
    chunks = to_chunks(full.kv, CHUNK_TOKENS)[:3]
    result = engine.prefill_suffix(LocalKv(chunks), tokens[15:], prefix_tokens=15)
    assert result.kv.length == 23
    assert np.array_equal(to_chunks(result.kv, CHUNK_TOKENS)[:3], chunks)
    np.testing.assert_allclose(result.kv.keys, full.kv.keys, rtol=0, atol=1e-5)
    np.testing.assert_allclose(result.kv.values, full.kv.values, rtol=0, atol=1e-5)


def test_each_layer_is_asked_for_only_when_the_one_before_has_computed() -> None:
    clock = Clock()
    engine = ReferenceEngine(CONFIG, clock)
    tokens = np.arange(23)
    chunks = to_chunks(engine.prefill(tokens).kv, CHUNK_TOKENS)[:2]
    clock.now_s = 0.0
    source = RecordingSource(chunks, clock)
    timeline = engine.prefill_suffix(source, tokens[10:], prefix_tokens=10).timeline
    assert source.asked == [(0, 1.0), (1, 5.0), (2, 9.0)]
    assert [
        (row.layer, row.wait_start_s, row.ready_s, row.compute_start_s, row.compute_end_s)
        for row in timeline
    ] == [(0, 1, 2, 3, 4), (1, 5, 6, 7, 8), (2, 9, 10, 11, 12)]
    assert (timeline[1].stall_s, timeline[1].compute_s) == (1.0, 2.0)


def test_a_layer_with_fewer_tokens_than_the_prefix_is_refused() -> None:
    engine = ReferenceEngine(CONFIG)
    chunks = to_chunks(engine.prefill(np.arange(23)).kv, CHUNK_TOKENS)[:3]
    with pytest.raises(InvalidRequest, match="layer 0 holds 15 tokens, the prefix has 20"):
        engine.prefill_suffix(LocalKv(chunks), [1], prefix_tokens=20)


def test_a_layer_of_another_geometry_is_refused() -> None:
    engine = ReferenceEngine(CONFIG)
    with pytest.raises(InvalidRequest, match="not a multiple of 64 bytes a token"):
        engine.prefill_suffix(LocalKv(np.zeros((2, 3, 100), np.uint8)), [1], prefix_tokens=3)


def test_an_error_of_the_source_reaches_the_caller() -> None:
    class Failing:
        def wait_layer(self, layer: int) -> npt.NDArray[np.uint8]:
            raise TimeoutError(f"layer {layer}")

    with pytest.raises(TimeoutError, match="layer 0"):
        ReferenceEngine(CONFIG).prefill_suffix(Failing(), [1], prefix_tokens=5)


@pytest.mark.parametrize("tokens", [b"", [256], [-1]])
def test_tokens_that_are_no_bytes_are_refused(tokens: bytes | list[int]) -> None:
    with pytest.raises(InvalidRequest, match="tokens must"):
        ReferenceEngine(CONFIG).prefill(tokens)


def test_a_cache_that_grows_keeps_what_it_holds() -> None:
    kv = filled_cache(tokens=4, capacity=6)
    keys, values = kv.keys[:, :, :4].copy(), kv.values[:, :, :4].copy()
    kv.reserve(5)
    assert kv.capacity == 6
    kv.reserve(9)
    assert kv.capacity == 9
    assert np.array_equal(kv.keys[:, :, :4], keys)
    assert np.array_equal(kv.values[:, :, :4], values)
    assert repr(kv) == "<KvCache 4/9 tokens, 3 layers, 0.0 MiB>"
