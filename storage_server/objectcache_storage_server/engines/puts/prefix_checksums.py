"""Checksums of a put's chunks, taken as the payload arrives."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.block_checksums import block_checksums, slice_block_bytes


class PrefixChecksums:
    """xxh3_64 of every block, by chunk. Raises `InvalidRequest` for slices that cannot be divided
    into blocks.
    """

    def __init__(self, shape: PrefixShape) -> None:
        self.block_bytes = slice_block_bytes(shape.slice_bytes)
        self._shape = shape
        blocks = shape.chunk_bytes // self.block_bytes
        self._sums: npt.NDArray[np.uint64] = np.zeros((len(shape.keys), blocks), np.uint64)

    def note(self, position_bytes: int, data: memoryview) -> None:
        """Take bytes of the payload, which begin at a block."""
        block_bytes = self.block_bytes
        assert position_bytes % block_bytes == 0, "a piece begins at a block"
        sums = np.array(block_checksums(data, block_bytes), np.uint64)
        numbers = np.arange(len(sums)) + position_bytes // block_bytes
        if not self._shape.layerwise:
            self._sums.reshape(-1)[numbers] = sums
            return
        blocks_each = self._shape.slice_bytes // block_bytes
        slices, block = np.divmod(numbers, blocks_each)
        layers, chunks = np.divmod(slices, len(self._shape.keys))
        self._sums[chunks, layers * blocks_each + block] = sums

    def note_slices(self, layer: int, first: int, sums: Sequence[int]) -> None:
        """Take those of slices of a layer, from chunk `first` on, whose bytes are not at hand."""
        assert self.block_bytes == self._shape.slice_bytes, "a slice is one block"
        self._sums[first : first + len(sums), layer] = sums

    def of_slices(self, first: int, count: int, layer: int) -> list[int] | None:
        """Those of a layer of neighbours, from chunk `first` on, once their bytes were noted; None
        where a slice is several blocks.
        """
        if self.block_bytes != self._shape.slice_bytes:
            return None
        sums: list[int] = self._sums[first : first + count, layer].tolist()
        return sums

    @cached_property
    def of_chunks(self) -> list[array[int]]:
        """Those of each chunk, once the whole payload was noted."""
        raw, step = self._sums.tobytes(), self._sums.shape[1] * self._sums.itemsize
        return [array("Q", raw[begin : begin + step]) for begin in range(0, len(raw), step)]
