"""Causal grouped-query attention in blocks of queries, so that memory stays bounded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

# Scores of one block of queries against all keys. Small enough that the four passes over them find
# them in the cache of a core, large enough that the matrix products stay efficient.
SCORES_BLOCK_BYTES = 1 << 20
QUERY_BLOCK_MIN = 16
QUERY_BLOCK_MAX = 256


def causal_attention(queries: Array, keys: Array, values: Array, first_position: int) -> Array:
    """Attention of the tokens at `first_position`, `first_position + 1`, ... over all before them.

    `queries` float32[tokens, n_heads, head_dim], rotated and scaled by 1/sqrt(head_dim); `keys` and
    `values` float32[n_kv_heads, first_position + tokens, head_dim]. Query head h reads key head
    h // (n_heads / n_kv_heads). Returns float32[tokens, n_heads, head_dim].
    """
    tokens, n_heads = queries.shape[:2]
    n_kv_heads, position_count = keys.shape[:2]
    assert position_count == first_position + tokens
    group = n_heads // n_kv_heads
    output = np.empty_like(queries)
    block = _query_block(group, position_count)
    scores = np.empty(group * block * position_count, np.float32)
    future = np.triu(np.full((block, block), -np.inf, np.float32), 1)
    for start in range(0, tokens, block):
        rows = slice(start, min(start + block, tokens))
        for head in range(n_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            seen = slice(0, first_position + rows.stop)
            output[rows, heads] = _attend(
                queries[rows, heads], keys[head, seen], values[head, seen], scores, future
            )
    return output


def _query_block(group: int, position_count: int) -> int:
    rows = SCORES_BLOCK_BYTES // (4 * group * position_count)
    return min(max(rows, QUERY_BLOCK_MIN), QUERY_BLOCK_MAX)


def _attend(
    queries: Array, keys: Array, values: Array, scores_memory: Array, future: Array
) -> Array:
    """One block of queries of the heads that share one key head: float32[rows, group, head_dim]."""
    rows, group, head_dim = queries.shape
    seen = keys.shape[0]
    stacked = queries.transpose(1, 0, 2).reshape(group * rows, head_dim)
    scores = scores_memory[: group * rows * seen].reshape(group * rows, seen)
    np.matmul(stacked, keys.T, out=scores)
    scores.reshape(group, rows, seen)[:, :, seen - rows :] += future[:rows, :rows]
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=1, keepdims=True)
    attended = scores @ values
    attended /= total
    return attended.reshape(group, rows, head_dim).transpose(1, 0, 2)
