"""KV bytes made from keys, and that a check finds every way of being wrong."""

import numpy as np
import pytest

from objectcache_laboratory.replay.kv_bytes import KvBytes, slice_words
from objectcache_schemas.chunk_keys import rolling_keys
from objectcache_schemas.layout import KvLayout

LAYOUT = KvLayout(
    num_layers=5, chunk_tokens=16, per_layer_chunk_bytes=4096, dtype="uint8", fingerprint="test"
)
KEYS = list(rolling_keys(b"seed", [np.array([n], np.uint32) for n in range(300)]))


def layer_of(chunks: np.ndarray, layer: int) -> np.ndarray:
    return np.ascontiguousarray(chunks[:, layer])


def test_bytes_follow_from_key_and_layer_alone() -> None:
    chunks = KvBytes(LAYOUT).chunks(KEYS[:3])
    assert chunks.shape == (3, 5, 4096)
    assert np.array_equal(KvBytes(LAYOUT).chunks(KEYS[2:3])[0], chunks[2])


def test_right_bytes_are_right_however_they_lie_in_memory() -> None:
    kv = KvBytes(LAYOUT)
    chunks = kv.chunks(KEYS)
    for layer in range(5):
        assert kv.wrong_bytes(KEYS, layer, layer_of(chunks, layer)) == 0
        assert kv.wrong_bytes(KEYS, layer, chunks[:, layer]) == 0  # strided, as chunkwise arrives


def test_every_single_wrong_byte_is_counted() -> None:
    kv = KvBytes(LAYOUT)
    rng = np.random.default_rng(7)
    for count in (1, 2, 100):
        payload = layer_of(kv.chunks(KEYS), 3)
        flat = payload.reshape(-1)
        flat[rng.choice(flat.size, count, replace=False)] ^= 0x80
        assert kv.wrong_bytes(KEYS, 3, payload) == count


@pytest.mark.parametrize(
    "mistake",
    [
        lambda chunks: np.roll(chunks[:, 1], 1, axis=0),  # another chunk's slice
        lambda chunks: chunks[:, 2],  # another layer
        lambda chunks: np.roll(chunks[:, 1], 8, axis=1),  # another place in the slice
        lambda chunks: np.zeros_like(chunks[:, 1]),  # never written
    ],
    ids=["another chunk", "another layer", "another place", "never written"],
)
def test_bytes_of_the_wrong_place_are_nearly_all_wrong(mistake: object) -> None:
    assert callable(mistake)
    kv = KvBytes(LAYOUT)
    payload = np.ascontiguousarray(mistake(kv.chunks(KEYS)))
    assert kv.wrong_bytes(KEYS, 1, payload) > 0.9 * payload.size


def test_no_two_slices_share_a_word() -> None:
    words = slice_words(KEYS, 64)
    assert len(np.unique(words)) == words.size
