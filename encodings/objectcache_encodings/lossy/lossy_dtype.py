"""What a lossy dtype is: a slice of fewer bytes, from which other numbers come back, close ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from objectcache_encodings.lossy.kv_shape import Floats, KvShape
from objectcache_schemas.errors import DamagedData, InvalidRequest

SCALE_BYTES = 2  # a bfloat16, which has the range of every number that a model computes with
BLOCK_NUMBERS = 1 << 18  # dequantised at once, or those of one token: 1 MiB of float32


class LossyDtype(ABC):
    """Quantises slices of one shape, and brings their numbers back.

    A slice is its groups' scales, then a symbol a number. Both are in the order of
    [parts, tokens, heads, width], and what is told of a slice's layer is its number in the model.
    """

    name: ClassVar[str]

    def __init__(self, shape: KvShape) -> None:
        self.shape = shape
        token_numbers = shape.count // shape.tokens
        self.block_tokens = min(shape.tokens, max(1, BLOCK_NUMBERS // token_numbers))

    @property
    @abstractmethod
    def slice_bytes(self) -> int:
        """Bytes of a quantised slice: the layout's `per_layer_chunk_bytes`."""

    @abstractmethod
    def error_bound(self, floats: Floats, layer: int) -> Floats:
        """How far each number of a slice may be off, before it is rounded to the model's type."""

    def quantise(
        self, slices: npt.NDArray[np.uint8], layer: int, first_chunk: int = 0
    ) -> npt.NDArray[np.uint8]:
        """Slices uint8[n, shape.slice_bytes] of one layer as uint8[n, slice_bytes]; they are of
        chunks in a row, of which `first_chunk` is the first.

        Raises `InvalidRequest` for other shapes, and for numbers that are not finite, with the
        chunk that has them.
        """
        _check("slices", slices, (self.shape.slice_bytes,))
        quantised = np.empty((len(slices), self.slice_bytes), np.uint8)
        for chunk, (slice_, place) in enumerate(zip(slices, quantised, strict=True), first_chunk):
            try:
                floats = self.shape.to_floats(slice_)
            except InvalidRequest as error:
                raise InvalidRequest(f"chunk {chunk}, layer {layer}: {error.message}") from error
            self._quantise(floats, layer, place)
        return quantised

    def dequantise(
        self, quantised: npt.NDArray[np.uint8], layer: int, out: npt.NDArray[np.uint8]
    ) -> None:
        """Slices uint8[n, slice_bytes] of one layer as numbers of the model's type, into `out`,
        uint8[n, shape.slice_bytes] or uint8[n, parts, part_bytes]; any strides will do but that of
        the last axis, along which bytes lie together.

        Takes memory for a block of tokens, however long a slice is.

        Raises `InvalidRequest` for other shapes, and `DamagedData` where a scale is not finite, or
        so large that numbers are over all that can be quantised. Then some of `out` may be
        overwritten, with bytes that are to be used for nothing.
        """
        _check("quantised", quantised, (self.slice_bytes,))
        parts, tokens, *token_shape = self.shape.axes
        part_bytes = self.shape.slice_bytes // parts
        _check("out", out, (self.shape.slice_bytes,), (parts, part_bytes))
        if len(out) != len(quantised):
            raise InvalidRequest(f"out has {len(out)} slices, not {len(quantised)}")
        memory = np.empty(self.block_tokens * self.shape.count // tokens, np.float32)
        token_bytes = part_bytes // tokens
        for slice_, place in zip(quantised, out.reshape(-1, parts, part_bytes), strict=True):
            for begin in range(0, tokens, self.block_tokens):
                end = min(tokens, begin + self.block_tokens)
                used = memory[: (end - begin) * self.shape.count // tokens]
                floats = used.reshape(parts, end - begin, *token_shape)
                if not self._dequantise(slice_, layer, begin, floats):
                    raise DamagedData(
                        f"a slice of {self.name} has a scale or symbol that no number has"
                    )
                some = place[:, begin * token_bytes : end * token_bytes]
                self.shape.from_floats(floats, some)

    @abstractmethod
    def _quantise(self, floats: Floats, layer: int, place: npt.NDArray[np.uint8]) -> None:
        """Write the quantised slice to `place`; may overwrite `floats`."""

    @abstractmethod
    def _dequantise(
        self, quantised: npt.NDArray[np.uint8], layer: int, begin: int, floats: Floats
    ) -> bool:
        """Write the numbers of a block of tokens, of which `begin` is the first, to `floats`,
        float32[parts, tokens of the block, heads, width]. False where a scale is not finite, or a
        number would be over twice the largest that is quantised, and may overflow.
        """


def _check(name: str, array: npt.NDArray[np.uint8], *shapes: tuple[int, ...]) -> None:
    if array.dtype != np.uint8 or array.shape[1:] not in shapes:
        needed = " or ".join(str(("n", *shape)) for shape in shapes)
        raise InvalidRequest(f"{name} is {array.dtype} of shape {array.shape}, not uint8{needed}")
    if array.size and array.strides[-1] != 1:
        raise InvalidRequest(f"the bytes of {name} do not lie together along its last axis")
