"""Seals: how rot in a row is found.

A row lies behind a checksum that is seeded with what it belongs to, so that neither a changed byte
nor a row under another key goes unnoticed, though the row repeats neither.
"""

from __future__ import annotations

import xxhash

SEAL_BYTES = 8  # of the checksum before a body

_digest = xxhash.xxh3_64_digest


def seal(body: bytes, owner: int) -> bytes:
    """The body behind a checksum that holds only for this owner: a hash, or a number."""
    return _digest(body, owner) + body


def unseal(stored: bytes, owner: int) -> bytes | None:
    """The body; None where it is not what was sealed for this owner."""
    body = stored[SEAL_BYTES:]
    return body if _digest(body, owner) == stored[:SEAL_BYTES] else None
