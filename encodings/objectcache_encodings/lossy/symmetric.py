"""Symmetric quantisation: a scale for each group of numbers, and whole multiples of it.

A scale is the group's largest magnitude over the highest symbol, rounded up to bfloat16, so that no
number lies beyond. What comes back is off by half a scale at most.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from objectcache_encodings.lossy.kv_shape import (
    MAGNITUDE_MAX,
    Floats,
    KvShape,
    above,
    bfloat16_floats,
)
from objectcache_encodings.lossy.lossy_dtype import SCALE_BYTES, LossyDtype

_ZERO = 128  # the symbol of 0: bytes are symbols + 128
_ANY_SYMBOL_MAX = 2.0**120  # scales up to which no byte makes a number that overflows


class _Symmetric(LossyDtype):
    """One byte a number. Subclasses say what a group is, and how high symbols go."""

    group_axes: ClassVar[tuple[int, ...]]  # of [parts, tokens, heads, width]

    def __init__(self, shape: KvShape) -> None:
        super().__init__(shape)
        self._scales_shape = tuple(
            1 if axis in self.group_axes else length for axis, length in enumerate(shape.axes)
        )
        self._scales_bytes = SCALE_BYTES * int(np.prod(self._scales_shape))

    @property
    def slice_bytes(self) -> int:
        return self._scales_bytes + self.shape.count

    @abstractmethod
    def symbol_max(self, layer: int) -> tuple[int, int]:
        """The highest symbol of the first part and of the last."""

    def error_bound(self, floats: Floats, layer: int) -> Floats:
        steps = bfloat16_floats(self._scales(floats, layer))
        return np.broadcast_to(steps * np.float32(0.5), floats.shape)

    def _scales(self, floats: Floats, layer: int) -> npt.NDArray[np.uint16]:
        largest = np.abs(floats).max(axis=self.group_axes, keepdims=True)
        return above(largest / self._highest(layer))

    def _highest(self, layer: int) -> Floats:
        """`symbol_max` of each part, float32[parts, 1, 1, 1]."""
        highest = np.array(self.symbol_max(layer)[-self.shape.parts :], np.float32)
        return highest.reshape(-1, 1, 1, 1)

    def _quantise(self, floats: Floats, layer: int, place: npt.NDArray[np.uint8]) -> None:
        scales = self._scales(floats, layer)
        place[: self._scales_bytes] = scales.reshape(-1).view(np.uint8)
        steps = bfloat16_floats(scales)
        np.divide(floats, steps, out=floats, where=steps > 0)
        symbols = place[self._scales_bytes :].reshape(floats.shape)
        np.copyto(symbols, np.rint(floats, out=floats) + np.float32(_ZERO), casting="unsafe")

    def _dequantise(
        self, quantised: npt.NDArray[np.uint8], layer: int, begin: int, floats: Floats
    ) -> bool:
        tokens = slice(begin, begin + floats.shape[1])
        scales = quantised[: self._scales_bytes].view("<u2").reshape(self._scales_shape)
        steps = bfloat16_floats(scales[:, tokens])
        highest, sizes = self._highest(layer), np.abs(steps)
        if not (sizes <= 2 * MAGNITUDE_MAX / highest).all():
            return False
        symbols = quantised[self._scales_bytes :].reshape(self.shape.axes)
        np.subtract(symbols[:, tokens], np.float32(_ZERO), out=floats)
        if sizes.max() > _ANY_SYMBOL_MAX and (np.abs(floats) > highest).any():
            return False
        np.multiply(floats, steps, out=floats)
        return True


class Q8(_Symmetric):
    """8 bits: symbols to 127, a scale for each token and head."""

    name = "lossy-q8"
    group_axes = (3,)

    def symbol_max(self, layer: int) -> tuple[int, int]:
        return 127, 127


class Q6(_Symmetric):
    """6 bits in a byte each: fewer bytes than `Q8` only where they are encoded."""

    name = "lossy-q6"
    group_axes = (3,)

    def symbol_max(self, layer: int) -> tuple[int, int]:
        return 31, 31


class CacheGenBins(_Symmetric):
    """The bins of CacheGen (SIGCOMM 2024) as LMCache has them: 32 in early layers and 16 in later
    ones, a scale for each token. One byte each, so fewer bytes only where they are encoded.
    """

    name = "lossy-bins"
    group_axes = (2, 3)
    early_layers = (10, 2)  # of keys, of values

    def symbol_max(self, layer: int) -> tuple[int, int]:
        keys, values = (15 if layer < early else 7 for early in self.early_layers)
        return keys, values
