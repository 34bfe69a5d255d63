"""The KV geometry of a bucket, and the chunk keys that follow from it.

Servers that only pass layouts on do without numpy: `chunk_keys` is what needs it.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
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

    Raises `InvalidRequest` when built with a value out of bounds or of another type; the message
    names the field.
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
            _check_text(name, getattr(self, name))

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
    """Raise `InvalidRequest` naming the field unless it is an int, lowest <= value <= highest."""
    if type(value) is not int:  # no bool, and none of numpy's, which the wire does not take
        raise InvalidRequest(f"{name} must be an int, got {type(value).__name__}")
    if not lowest <= value <= highest:
        allowed = str(lowest) if lowest == highest else f"from {lowest} to {highest}"
        raise InvalidRequest(f"{name} must be {allowed}, got {value}")


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be a string, got {type(text).__name__}")
    try:
        length_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} is no valid Unicode: {error}") from error
    if not 1 <= length_bytes <= NAME_BYTES_MAX:
        raise InvalidRequest(f"{name} must hold 1 to {NAME_BYTES_MAX} bytes of UTF-8")


@dataclass(frozen=True, slots=True)
class TargetRows:
    """Where the layers of a part of a prefix lie in the target of the whole prefix.

    Rows of `row_bytes`, one a layer: the first at `first_bytes`, each `stride_bytes` behind the
    one before.
    """

    first_bytes: int
    row_bytes: int
    stride_bytes: int

    def place_bytes(self, payload_offset_bytes: int) -> int:
        """Where a piece of the payload lies that is in one row."""
        row, skip_bytes = divmod(payload_offset_bytes, self.row_bytes)
        return self.first_bytes + row * self.stride_bytes + skip_bytes

    def end_bytes(self, payload_bytes: int) -> int:
        """Where the last row of the payload ends."""
        return self.place_bytes(payload_bytes - self.row_bytes) + self.row_bytes


class TargetRing:
    """Where the layers of a payload lie in a target that is smaller than it: `place_count` places
    side by side, which the layers take in turn.
    """

    def __init__(self, place_count: int, place_bytes: int, layers_bytes: Sequence[int]) -> None:
        """`layers_bytes` are those of each layer as it is sent, one place's at most; what comes
        before the first layer is a part of it.
        """
        assert max(layers_bytes) <= place_bytes
        self.place_count = place_count
        self._place_bytes = place_bytes
        self._begins_bytes = tuple(accumulate(layers_bytes, initial=0))

    def number(self, payload_offset_bytes: int) -> int:
        """Which layer of the payload, from 0, a piece of it is in."""
        return bisect.bisect_right(self._begins_bytes, payload_offset_bytes) - 1

    def place_bytes(self, payload_offset_bytes: int) -> int:
        """Where a piece of the payload lies that is in one layer."""
        number = self.number(payload_offset_bytes)
        skip_bytes = payload_offset_bytes - self._begins_bytes[number]
        return number % self.place_count * self._place_bytes + skip_bytes

    def end_bytes(self, payload_bytes: int) -> int:
        """Where the last place ends."""
        return self.place_count * self._place_bytes
