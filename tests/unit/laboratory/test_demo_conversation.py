"""The conversation against a bucket in memory: what it puts, fetches and finds wrong."""

from __future__ import annotations

import math
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from objectcache import KvBucket, KvLayout
from objectcache_laboratory.demo.conversation import DemoConversation, FetchPath
from objectcache_laboratory.demo.results import SAME_HOST, DemoResult
from objectcache_laboratory.reference_engine.config import ModelConfig
from objectcache_laboratory.reference_engine.engine import ReferenceEngine

MODEL = ModelConfig(num_layers=2, hidden=32, n_heads=4, n_kv_heads=2, head_dim=8, mlp_hidden=48)
CHUNK_TOKENS = 8
DOCUMENT = b"Forty-two bytes of text that mean nothing."
Bytes = npt.NDArray[np.uint8]


class MemoryDelivery:
    """All layers are there at once."""

    transport = "memory"

    def __init__(self, chunks: Bytes, mode: str) -> None:
        self.chunks = chunks
        self.mode = mode
        self.arrivals_s = [0.0] * chunks.shape[1]
        self.wire_bytes = self.delivered_bytes = chunks.nbytes

    def wait_layer(self, layer: int) -> Bytes:
        return self.chunks[:, layer]

    def __enter__(self) -> MemoryDelivery:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class MemoryBucket:
    """Chunks in a dict; `flipped` turns a bit of what one delivery mode fetches."""

    def __init__(self, layout: KvLayout, flipped: str = "") -> None:
        self.layout = layout
        self.flipped = flipped
        self.chunks: dict[str, Bytes] = {}

    def chunk_keys(self, tokens: bytes) -> list[str]:
        return self.layout.chunk_keys(tokens)

    def match(self, keys: list[str]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.chunks), len(keys))

    def put(self, keys: list[str], chunks: Bytes, *, parent_key: str | None) -> None:
        assert parent_key is None or parent_key in self.chunks
        for key, chunk in zip(keys, chunks, strict=True):
            assert key not in self.chunks
            self.chunks[key] = chunk.copy()

    def fetch(self, keys: list[str], *, delivery: str, compute_window_s: float) -> MemoryDelivery:
        assert compute_window_s > 0
        fetched = np.stack([self.chunks[key] for key in keys])
        if delivery == self.flipped:
            fetched[0, 1, 3] ^= 0x40  # the high bits of a key's float32
        return MemoryDelivery(fetched, delivery)


def converse(bucket: MemoryBucket) -> DemoResult:
    paths = [FetchPath(SAME_HOST, cast("KvBucket", bucket))]
    conversation = DemoConversation(
        ReferenceEngine(MODEL), paths, CHUNK_TOKENS, 5, lambda step: None
    )
    questions = (DOCUMENT, b" And then? ", b" Why? ")
    turns = tuple(conversation.turn(question) for question in questions)
    return DemoResult("text", len(DOCUMENT), MODEL, CHUNK_TOKENS, (SAME_HOST,), turns)


def test_every_turn_fetches_all_whole_chunks_that_were_said_before() -> None:
    bucket = MemoryBucket(MODEL.kv_layout(CHUNK_TOKENS))
    result = converse(bucket)
    assert result.failures() == []
    # Of 42 + 5 tokens 46 have KV: 5 chunks. Of 63 then 62: 7 chunks.
    assert [turn.prompt_tokens for turn in result.turns] == [42, 58, 69]
    assert [turn.hit_tokens for turn in result.turns] == [0, 40, 56]
    assert [turn.stored_chunks for turn in result.turns] == [5, 2, 2]
    assert result.turns[2].fetched_bytes == 7 * bucket.layout.chunk_bytes
    assert len(bucket.chunks) == 9


@pytest.mark.parametrize("mode", ["chunkwise", "layerwise"])
def test_one_flipped_bit_in_a_delivery_is_found(mode: str) -> None:
    failures = converse(MemoryBucket(MODEL.kv_layout(CHUNK_TOKENS), flipped=mode)).failures()
    fetching = f"{mode} fetching over {SAME_HOST}"
    assert any(f"{fetching} gave other bytes" in failure for failure in failures)
    assert any(f"{fetching} are not bit-identical" in failure for failure in failures)


def test_measured_times_are_in_order() -> None:
    turn = converse(MemoryBucket(MODEL.kv_layout(CHUNK_TOKENS))).turns[1]
    for reuse in turn.reuses:
        times = [0.0, reuse.fetch_start_s]
        for events in reuse.layers:
            times += [events.wait_start_s, events.compute_start_s, events.compute_end_s]
        assert [*times, reuse.ttft_s] == sorted([*times, reuse.ttft_s])
        assert all(math.isclose(events.arrival_s, reuse.fetch_start_s) for events in reuse.layers)
