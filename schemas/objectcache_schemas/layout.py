"""The KV geometry of a bucket, and the chunk keys that follow from it.

Servers that only pass layouts on do without numpy: `chunk_keys` is what needs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from objectcache_schemas.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LAYOUT_VERSION = 1
NUM_LAYERS_MAX = 4096  # far above any model; bounds loops over layers
CHUNK_TOKENS_MAX = 65_536
SLICE_BYTES_MAX = 1 << 30
NAME_BYTES_MAX = 1024  # dtype and fingerprint are names, not documents

_SEED_DOMAIN = b"objectcache/chunk-key/v1\0"


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Shape of every chunk of a bucket: `uint8[num_layers, per_layer_chunk_bytes]`.

    `fingerprint` is free text that tells apart everything that makes KV bytes differ: weights
    revision, quantisation, tensor-parallel rank. It seeds the chunk keys, so that two geometries
    never meet under one key.

    Raises `InvalidRequest` when built with a value out of bounds; the message names the field.
    """

    num_layers: int
    chunk_tokens: int
    per_layer_chunk_bytes: int
    dtype: str
    fingerprint: str
    v: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        check_int("v", self.v, LAYOUT_VERSION, LAYOUT_VERSION)
        check_geometry(self.num_layers, self.chunk_tokens, self.per_layer_chunk_bytes)
        for name in ("dtype", "fingerprint"):
            if not 1 <= len(getattr(self, name).encode()) <= NAME_BYTES_MAX:
                raise InvalidRequest(f"{name} must hold 1 to {NAME_BYTES_MAX} bytes of UTF-8")

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk: num_layers x per_layer_chunk_bytes."""
        return self.num_layers * self.per_layer_chunk_bytes

    def to_bytes(self) -> bytes:
        """The layout as a msgpack map, fields in declared order."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> KvLayout:
        """Parse a msgpack map; raises `InvalidRequest` naming what is wrong."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"KV layout: {error}") from error

    def key_seed(self) -> bytes:
        """H_{-1} of the rolling hash: SHA-256 over a domain name and the layout's msgpack map."""
        return hashlib.sha256(_SEED_DOMAIN + self.to_bytes()).digest()

    def chunk_keys(self, tokens: Sequence[int] | npt.NDArray[np.integer] | bytes) -> list[str]:
        """Keys of the whole chunks of `tokens`, as lowercase hex of SHA-256(H_{i-1} || tokens_i).

        `tokens` are token ids below 2**32 (bytes are ids below 256); each is hashed as 4 bytes,
        little-endian. A last chunk of fewer than `chunk_tokens` tokens has no key. Paper: section
        2.1, H_i = Hash(H_{i-1} || tokens_i).
        """
        from objectcache_schemas.chunk_keys import rolling_keys, whole_chunks

        return list(rolling_keys(self.key_seed(), whole_chunks(tokens, self.chunk_tokens)))


def check_geometry(num_layers: int, chunk_tokens: int, per_layer_chunk_bytes: int) -> None:
    """Raise `InvalidRequest` naming the first of the three that is out of bounds."""
    check_int("num_layers", num_layers, 1, NUM_LAYERS_MAX)
    check_int("chunk_tokens", chunk_tokens, 1, CHUNK_TOKENS_MAX)
    check_int("per_layer_chunk_bytes", per_layer_chunk_bytes, 1, SLICE_BYTES_MAX)


def check_int(name: str, value: int, lowest: int, highest: int) -> None:
    """Raise `InvalidRequest` naming the field unless lowest <= value <= highest."""
    if not lowest <= value <= highest:
        allowed = str(lowest) if lowest == highest else f"from {lowest} to {highest}"
        raise InvalidRequest(f"{name} must be {allowed}, got {value}")
