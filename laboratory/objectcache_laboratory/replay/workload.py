"""What a trace means for a store: the geometry, the keys, and what must hit. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from objectcache_laboratory.replay.trace import TraceRequest
from objectcache_schemas.chunk_keys import rolling_keys
from objectcache_schemas.layout import KvLayout

# Llama 3.1 8B: 2 (K, V) x 8 KV heads x 128 wide x 2 bytes, for each layer.
MODEL_SLICE_BYTES_PER_TOKEN = 4096
BLOCK_TOKENS = 512
WORD_BYTES = 8  # slices are whole words, so that their bytes are made and compared as words


def replay_layout(scale: float, layers: int, block_tokens: int, seed: int) -> KvLayout:
    """The geometry: a slice is `scale` x 4,096 bytes x `block_tokens`, in whole words.

    The seed is in the fingerprint and so in every key: nothing that another seed stored can hit.
    Raises `InvalidRequest` naming what is out of bounds.
    """
    words = round(MODEL_SLICE_BYTES_PER_TOKEN * scale * block_tokens / WORD_BYTES)
    return KvLayout(
        num_layers=layers,
        chunk_tokens=block_tokens,
        per_layer_chunk_bytes=max(1, words) * WORD_BYTES,
        dtype="uint8",
        fingerprint=f"objectcache trace replay, seed {seed}",
    )


def bucket_name(layout: KvLayout) -> str:
    """A bucket of its own for each geometry and seed, the same on every run."""
    return f"replay-{layout.key_seed().hex()[:16]}"


def chunk_keys(layout: KvLayout, request: TraceRequest) -> list[str]:
    """Keys of the request's blocks: the key of block i depends on the hash ids up to i."""
    ids = np.asarray(request.hash_ids, "<u8")
    return list(rolling_keys(layout.key_seed(), ids.view("<u4").reshape(len(ids), 2)))


def tokens_of(request: TraceRequest, block_count: int, block_tokens: int) -> int:
    """Prompt tokens in the first `block_count` blocks; the last block may be a short one."""
    return min(block_count * block_tokens, request.input_length)


def first_askers(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """Of each request, for its matched blocks in order, the number of the request that asked for
    the block first and so puts it: in a store that was empty, loses nothing, and is asked one
    request at a time. What a replay falls short of it, eviction or concurrency took.
    """
    nodes: dict[tuple[int, int], tuple[int, int]] = {}  # (node before, hash id) to (node, asker)
    return [_insert(nodes, request.hash_ids, number) for number, request in enumerate(requests)]


def _insert(
    nodes: dict[tuple[int, int], tuple[int, int]], hash_ids: Sequence[int], number: int
) -> list[int]:
    """Add a prefix to the tree; returns who asked first for those of its blocks that were there."""
    node, askers = -1, list[int]()
    for hash_id in hash_ids:
        before = len(nodes)
        node, asker = nodes.setdefault((node, hash_id), (before, number))
        if len(nodes) == before:
            askers.append(asker)
    return askers
