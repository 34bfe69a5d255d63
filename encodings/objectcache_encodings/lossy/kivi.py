"""Four bits a number, as KIVI (arXiv:2402.02750) groups them: keys by channel, values by token.

Channels of keys differ in size by far more than tokens do, so a scale of their own keeps the small
ones. A group has the least number that it can hold and the step to the next one; both are bfloat16,
the former rounded down and the latter up, so that no number lies beyond.
"""

from __future__ import annotations

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
from objectcache_schemas.errors import InvalidRequest

SYMBOL_MAX = 15
CHANNEL_TOKENS_MAX = 64  # of one group
_STEP_MAX = 4 * MAGNITUDE_MAX / (SYMBOL_MAX + 1)  # the range of a group is twice a number's


class Q4(LossyDtype):
    """4 bits, two numbers a byte, the earlier in the lower half.

    A group is a channel of up to 64 tokens' keys, or the values of a token and head; a model of one
    part (MLA) has groups of the latter kind only.
    """

    name = "lossy-q4"

    def __init__(self, shape: KvShape) -> None:
        super().__init__(shape)
        if shape.width % 2:
            raise InvalidRequest(f"{self.name} needs an even width of heads, got {shape.width}")
        together = next(
            n for n in range(min(shape.tokens, CHANNEL_TOKENS_MAX), 0, -1) if shape.tokens % n == 0
        )
        if self.block_tokens < shape.tokens:  # whole groups, or an equal part of one
            most = self.block_tokens
            self.block_tokens = (
                most // together * together
                if most >= together
                else next(n for n in range(most, 0, -1) if together % n == 0)
            )
        # Views of the parts in which a group is along one axis.
        tokens, heads, width = shape.tokens, shape.heads, shape.width
        by_token = ((tokens, heads, width), 2)
        by_channel = ((tokens // together, together, heads * width), 1)
        self._parts = [by_channel, by_token][-shape.parts :]
        self._bounds_shapes = [
            tuple(1 if axis == along else length for axis, length in enumerate(axes))
            for axes, along in self._parts
        ]
        self._bounds_bytes = sum(2 * SCALE_BYTES * int(np.prod(s)) for s in self._bounds_shapes)

    @property
    def slice_bytes(self) -> int:
        return self._bounds_bytes + self.shape.count // 2

    def error_bound(self, floats: Floats, layer: int) -> Floats:
        bound = np.empty_like(floats)
        for number, (axes, along) in enumerate(self._parts):
            _, steps = _bounds(floats[number].reshape(axes), along)
            bound[number].reshape(axes)[...] = bfloat16_floats(steps) * np.float32(0.5)
        return bound

    def _quantise(self, floats: Floats, layer: int, place: npt.NDArray[np.uint8]) -> None:
        bounds = list[npt.NDArray[np.uint8]]()
        symbols = np.empty(floats.shape, np.uint8)
        for number, (axes, along) in enumerate(self._parts):
            part = floats[number].reshape(axes)
            lowest, steps = _bounds(part, along)
            bounds += [one.reshape(-1).view(np.uint8) for one in (lowest, steps)]
            size = bfloat16_floats(steps)
            part -= bfloat16_floats(lowest)
            np.divide(part, size, out=part, where=size > 0)
            np.copyto(symbols[number].reshape(axes), np.rint(part, out=part), casting="unsafe")
        place[: self._bounds_bytes] = np.concatenate(bounds)
        pairs = symbols.reshape(-1, 2)
        np.bitwise_or(pairs[:, 0], pairs[:, 1] << 4, out=place[self._bounds_bytes :])

    def _dequantise(
        self, quantised: npt.NDArray[np.uint8], layer: int, begin: int, floats: Floats
    ) -> bool:
        end = begin + floats.shape[1]
        packed = quantised[self._bounds_bytes :].reshape(self.shape.parts, self.shape.tokens, -1)
        some = packed[:, begin:end]
        pairs = floats.reshape(*some.shape, 2)
        np.copyto(pairs[..., 0], some & 0xF)
        np.copyto(pairs[..., 1], some >> 4)
        bounds_begin = 0
        for number, (axes, _) in enumerate(self._parts):
            shape = self._bounds_shapes[number]
            bounds_end = bounds_begin + 2 * SCALE_BYTES * int(np.prod(shape))
            words = quantised[bounds_begin:bounds_end].view("<u2").reshape(2, *shape)
            group_tokens = self.shape.tokens // axes[0]
            first, last = begin // group_tokens, -(-end // group_tokens)
            lowest, steps = bfloat16_floats(words[:, first:last])
            sizes = np.abs(steps)
            if not (sizes.max() <= _STEP_MAX and np.abs(lowest).max() <= 2 * MAGNITUDE_MAX):
                return False
            part = floats[number].reshape(last - first, -1, axes[2])
            np.multiply(part, steps, out=part)
            np.add(part, lowest, out=part)
            bounds_begin = bounds_end
        return True


def _bounds(part: Floats, along: int) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """The lowest number and the step of each group, bfloat16; the group is along one axis."""
    lowest = _below(part.min(axis=along, keepdims=True))
    span = part.max(axis=along, keepdims=True) - bfloat16_floats(lowest)
    return lowest, above(span / np.float32(SYMBOL_MAX))


def _below(floats: Floats) -> npt.NDArray[np.uint16]:
    """The bfloat16 next to each that is not above it."""
    bits = np.ascontiguousarray(floats).view(np.uint32)
    # Dropping bits goes towards zero, which is up where a number is negative.
    return np.where(floats < 0, above(floats), (bits >> 16).astype("<u2"))
