"""KV bytes that follow from a chunk's key and layer alone.

A slice is one block of random words, the same for all, XORed with a word that belongs to the key
and the layer. That runs at memory speed, and a check of every byte still finds what can go wrong in
delivery: bytes of another chunk or layer differ in the word, bytes of another place in the slice in
the block, and what was never written in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from objectcache_laboratory.replay.workload import WORD_BYTES
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import MIB

BLOCK_SEED = 0x0B1EC7CAC4E  # any number; the bytes differ between replays through their keys
PIECE_BYTES = 1 * MIB  # compared at once: stays in a core's cache

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]


class KvBytes:
    """The bytes of every chunk of `layout`, whose slices are whole words of 8 bytes."""

    def __init__(self, layout: KvLayout) -> None:
        assert layout.per_layer_chunk_bytes % WORD_BYTES == 0
        self._layout = layout
        words = layout.per_layer_chunk_bytes // WORD_BYTES
        self._block = np.random.default_rng(BLOCK_SEED).integers(
            0, 1 << 64, size=words, dtype=np.uint64
        )

    def chunks(self, keys: Sequence[str]) -> Bytes:
        """uint8[chunk_count, num_layers, per_layer_chunk_bytes], to be stored under `keys`."""
        words = slice_words(keys, self._layout.num_layers)
        return np.bitwise_xor(self._block, words[:, :, None]).view(np.uint8)

    def wrong_bytes(self, keys: Sequence[str], layer: int, kv: Bytes) -> int:
        """How many bytes of the layer payload `kv`, uint8[chunk_count, per_layer_chunk_bytes],
        are not those stored under `keys`.
        """
        words = slice_words(keys, self._layout.num_layers)[:, layer, None]
        rows = max(1, PIECE_BYTES // kv.shape[1])
        return sum(
            _differing_bytes(kv[first : first + rows], self._block ^ words[first : first + rows])
            for first in range(0, len(keys), rows)
        )


def slice_words(keys: Sequence[str], num_layers: int) -> Words:
    """uint64[chunk_count, num_layers], different for every key and layer.

    The first 64 bits of the key's digest, stepped by layer and mixed as in SplitMix64 (Steele,
    Lea and Flood 2014).
    """
    digests = np.array([int(key[:16], 16) for key in keys], np.uint64)
    steps = np.arange(1, num_layers + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = digests[:, None] + steps[None, :]
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)))


def _differing_bytes(kv: Bytes, expected: Words) -> int:
    if np.array_equal(kv.view(np.uint64), expected):
        return 0
    return int(np.count_nonzero(kv != expected.view(np.uint8)))
