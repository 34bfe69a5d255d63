"""Between the engine's KV and the store's chunks.

A chunk is `uint8[num_layers, S]`, and a slice of S bytes is float32[2 (K, V), chunk_tokens,
n_kv_heads, head_dim], the layout that inference engines call KV_L2TD.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import numpy.typing as npt

from objectcache_laboratory.reference_engine.config import DTYPE_BYTES
from objectcache_laboratory.reference_engine.kv_cache import KvCache

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class KvSource(Protocol):
    """Where the KV of a prefix comes from: a delivery, or memory."""

    def wait_layer(self, layer: int) -> Bytes:
        """Return that layer of all chunks, `uint8[chunk_count, S]`, as soon as it is there.

        The array is read before the next call and not kept. Its last axis is contiguous.
        """
        ...


class LocalKv:
    """Chunks in local memory, as a source: what reuse without a store would read."""

    def __init__(self, chunks: Bytes) -> None:
        """`chunks`: uint8[chunk_count, num_layers, S]; kept, not copied."""
        self._chunks = chunks

    def wait_layer(self, layer: int) -> Bytes:
        """That layer, at once."""
        return self._chunks[:, layer]


def to_chunks(
    kv: KvCache, chunk_tokens: int, first_chunk: int = 0, end_chunk: int | None = None
) -> Bytes:
    """The whole chunks of `kv` as `uint8[N, num_layers, S]`, copied once.

    A last chunk with fewer than `chunk_tokens` tokens is left out. `first_chunk` and `end_chunk`
    select a part, such as what a store does not have yet.
    """
    count = _selected_count(kv, chunk_tokens, first_chunk, end_chunk)
    slice_shape = _slice_shape(kv, chunk_tokens)
    chunks = np.empty((count, kv.num_layers, *slice_shape), np.float32)
    for layer in range(kv.num_layers):
        _copy_layer(kv, layer, first_chunk, chunks[:, layer])
    return chunks.view(np.uint8).reshape(count, kv.num_layers, _slice_bytes(slice_shape))


def load_layer(kv: KvCache, layer: int, payload: Bytes) -> None:
    """Copy one layer payload, `uint8[N, S]`, to the beginning of that layer of `kv`.

    Local and delivered KV take this one way into attention, so that their logits are bit-identical.
    """
    chunk_count, slice_bytes = payload.shape
    chunk_tokens = slice_bytes // _slice_bytes(_slice_shape(kv, 1))
    slices = payload.view(np.float32).reshape(chunk_count, *_slice_shape(kv, chunk_tokens))
    keys, values = _chunk_views(kv, layer, 0, chunk_count, chunk_tokens)
    keys[...] = slices[:, 0].transpose(2, 0, 1, 3)
    values[...] = slices[:, 1].transpose(2, 0, 1, 3)


def _selected_count(kv: KvCache, chunk_tokens: int, first_chunk: int, end_chunk: int | None) -> int:
    whole = kv.length // chunk_tokens
    end = whole if end_chunk is None else end_chunk
    assert 0 <= first_chunk <= end <= whole, (first_chunk, end, whole)
    return end - first_chunk


def _copy_layer(kv: KvCache, layer: int, first_chunk: int, slices: Array) -> None:
    """Fill float32[N, 2, G, n_kv_heads, head_dim] from one layer."""
    keys, values = _chunk_views(kv, layer, first_chunk, slices.shape[0], slices.shape[2])
    slices[:, 0] = keys.transpose(1, 2, 0, 3)
    slices[:, 1] = values.transpose(1, 2, 0, 3)


def _chunk_views(
    kv: KvCache, layer: int, first_chunk: int, count: int, chunk_tokens: int
) -> tuple[Array, Array]:
    """Keys and values of chunks of one layer as views, float32[n_kv_heads, N, G, head_dim]."""
    rows = slice(first_chunk * chunk_tokens, (first_chunk + count) * chunk_tokens)
    keys, values = kv.keys[layer, :, rows], kv.values[layer, :, rows]
    shape = (keys.shape[0], count, chunk_tokens, keys.shape[2])
    return keys.reshape(shape), values.reshape(shape)


def _slice_shape(kv: KvCache, chunk_tokens: int) -> tuple[int, int, int, int]:
    return 2, chunk_tokens, kv.keys.shape[1], kv.keys.shape[3]


def _slice_bytes(slice_shape: tuple[int, ...]) -> int:
    return math.prod(slice_shape) * DTYPE_BYTES
