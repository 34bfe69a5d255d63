"""The rolling hash that names chunks by their tokens, and by all that came before them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from objectcache_schemas.errors import InvalidRequest


def whole_chunks(
    tokens: Sequence[int] | npt.NDArray[np.integer] | bytes, chunk_tokens: int
) -> npt.NDArray[np.uint32]:
    """Little-endian uint32[chunk_count, chunk_tokens]; what does not fill a chunk is left out.

    Raises `InvalidRequest` unless all are ids from 0 to 2**32 - 1.
    """
    ids = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.asarray(tokens)
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 1 << 32):
        raise InvalidRequest("tokens must be ids from 0 to 2**32 - 1")
    chunk_count = ids.size // chunk_tokens
    whole = ids[: chunk_count * chunk_tokens].astype("<u4")
    return whole.reshape(chunk_count, chunk_tokens)


def rolling_keys(seed: bytes, rows: Iterable[npt.NDArray[np.uint32]]) -> Iterable[str]:
    """Lowercase hex of H_i = SHA-256(H_{i-1} || row_i bytes), H_{-1} = `seed`."""
    digest = seed
    for row in rows:
        digest = hashlib.sha256(digest + row.tobytes()).digest()
        yield digest.hex()
