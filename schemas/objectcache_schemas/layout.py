"""The KV geometry of a bucket, and the chunk keys that follow from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from objectcache_schemas.errors import InvalidRequest

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
        ids = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.asarray(tokens)
        if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= 1 << 32):
            raise InvalidRequest("tokens must be ids from 0 to 2**32 - 1")
        chunk_count = ids.size // self.chunk_tokens
        whole = ids[: chunk_count * self.chunk_tokens].astype("<u4")
        rows = whole.reshape(chunk_count, self.chunk_tokens)
        return list(rolling_keys(self.key_seed(), rows))


def rolling_keys(seed: bytes, rows: Iterable[npt.NDArray[np.uint32]]) -> Iterable[str]:
    """Lowercase hex of H_i = SHA-256(H_{i-1} || row_i bytes), H_{-1} = `seed`."""
    digest = seed
    for row in rows:
        digest = hashlib.sha256(digest + row.tobytes()).digest()
        yield digest.hex()


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
