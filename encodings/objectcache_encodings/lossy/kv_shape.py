"""The shape of a slice that a model computes with, and its numbers as float32 and back.

Quantising reads numbers, so it needs what the store never asks: how many heads a slice has, and of
which type its numbers are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import SLICE_BYTES_MAX

Floats = npt.NDArray[np.float32]

# By the number types that connectors name, with or without `torch.`
NUMBER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAGNITUDE_MAX = 2.0**125  # above it sums overflow; no model computes with such numbers
TOKEN_NUMBERS_MAX = (
    1 << 20
)  # of a part, far above any model; those of a token are in memory at once
_FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class KvShape:
    """Numbers of one layer of a chunk: [parts, tokens, heads, width].

    `parts` is 2 for keys and values, 1 where a model keeps one thing only (MLA). Raises
    `InvalidRequest` naming what is out of bounds.
    """

    tokens: int
    heads: int
    width: int
    numbers: str = "bfloat16"
    parts: int = 2

    def __post_init__(self) -> None:
        for name, value, highest in (
            ("tokens", self.tokens, 1 << 16),
            ("heads", self.heads, 1 << 12),
            ("width", self.width, 1 << 16),
            ("parts", self.parts, 2),
        ):
            if not 1 <= value <= highest:
                raise InvalidRequest(f"{name} must be from 1 to {highest}, got {value}")
        if self.numbers not in NUMBER_BYTES:
            raise InvalidRequest(
                f"numbers must be one of {', '.join(NUMBER_BYTES)}, got {self.numbers!r}"
            )
        for name, value, highest in (
            ("heads x width", self.heads * self.width, TOKEN_NUMBERS_MAX),
            ("bytes of a slice", self.slice_bytes, SLICE_BYTES_MAX),
        ):
            if value > highest:
                raise InvalidRequest(f"{name} must be {highest} at most, got {value}")

    @property
    def axes(self) -> tuple[int, int, int, int]:
        """Parts, tokens, heads, width."""
        return self.parts, self.tokens, self.heads, self.width

    @property
    def count(self) -> int:
        """Numbers of a slice."""
        return self.parts * self.tokens * self.heads * self.width

    @property
    def slice_bytes(self) -> int:
        """Bytes of a slice as the model computes with it."""
        return self.count * NUMBER_BYTES[self.numbers]

    def to_floats(self, slice_: npt.NDArray[np.uint8]) -> Floats:
        """float32[parts, tokens, heads, width], exactly.

        Raises `InvalidRequest` where a number is not finite, or over `MAGNITUDE_MAX`.
        """
        if self.numbers == "bfloat16":
            floats = (slice_.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            floats = slice_.view("<f2" if self.numbers == "float16" else "<f4").astype(np.float32)
        if not np.abs(floats).max() <= MAGNITUDE_MAX:
            raise InvalidRequest("a slice to quantise has numbers that are not finite or too large")
        return floats.reshape(self.axes)

    def from_floats(self, floats: Floats, slice_: npt.NDArray[np.uint8]) -> None:
        """Round to the nearest number of the model's type, into `slice_`, uint8[slice_bytes] or
        uint8[parts, ..], whose bytes lie together along the last axis. Overwrites `floats`.
        """
        if self.numbers == "bfloat16":
            words = slice_.view("<u2")
            bits = floats.view(np.uint32)
            np.add(bits, 0x8000, out=bits)
            np.right_shift(bits, 16, out=bits)
            np.copyto(words, bits.reshape(words.shape), casting="unsafe")
            return
        if self.numbers == "float16":
            np.clip(floats, -_FLOAT16_MAX, _FLOAT16_MAX, out=floats)
        numbers = slice_.view("<f2" if self.numbers == "float16" else "<f4")
        np.copyto(numbers, floats.reshape(numbers.shape), casting="same_kind")


def above(floats: Floats) -> npt.NDArray[np.uint16]:
    """The bfloat16 next to each, away from zero where it is none: at least its magnitude."""
    bits = np.ascontiguousarray(floats, np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) >> 16).astype("<u2")


def bfloat16_floats(words: npt.NDArray[np.uint16]) -> Floats:
    """bfloat16 as float32, exactly."""
    return (words.astype(np.uint32) << 16).view(np.float32)
