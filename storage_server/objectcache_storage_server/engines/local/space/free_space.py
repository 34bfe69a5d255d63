"""Free space of the volume. Pure: it neither reads nor writes the device.

Space is given out in whole blocks and a run of it never crosses a segment's end. Free runs never
touch within a segment: what is freed joins its neighbours.

A request takes the smallest run that holds it, of equal ones the first in the volume, and the
piece is cut from the run's begin. Cutting large pieces from the end of a run, or of the volume, was
simulated over turns of puts and evictions of all sizes: it left no more space usable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict, SortedList

from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES

OFFSET_BITS = 48  # of an offset in blocks, in the key that orders runs by length: 2^60 bytes


class Allocator:
    """Which bytes of which segments are nobody's."""

    def __init__(self, segment_bytes: int) -> None:
        assert segment_bytes > 0
        assert segment_bytes % BLOCK_BYTES == 0
        self.segment_bytes = segment_bytes
        self.free_bytes = 0
        self._segment_blocks = segment_bytes // BLOCK_BYTES
        self._segments: set[int] = set()
        self._runs: Any = SortedDict()  # int to int: block at which a free run begins, its blocks
        self._by_length: Any = SortedList()  # of int: blocks << OFFSET_BITS | begin

    def __repr__(self) -> str:
        return (
            f"<Allocator {len(self._segments)} segments, {self.free_bytes} bytes free "
            f"in {len(self._runs)} runs>"
        )

    # --- segments ---

    def add_segment(self, number: int) -> None:
        """A segment that is wholly free."""
        assert number not in self._segments, number
        self._segments.add(number)
        self._add_run(number * self._segment_blocks, self._segment_blocks)

    def remove_segment(self, number: int) -> None:
        """Give out nothing of it any more. It must be wholly free."""
        assert self.segment_is_free(number), number
        self._segments.remove(number)
        self._remove_run(number * self._segment_blocks)

    def segment_is_free(self, number: int) -> bool:
        """Whether no part of this segment is given out; it must exist."""
        assert number in self._segments, number
        blocks: int = self._runs.get(number * self._segment_blocks, 0)
        return blocks == self._segment_blocks

    # --- opening ---

    def take_all(
        self, offsets_bytes: npt.NDArray[np.uint64], lengths_bytes: npt.NDArray[np.uint64]
    ) -> None:
        """Mark what the extents of a store cover, once, when nothing is given out yet.

        Raises `ValueError` that names the first range which no segment holds, or which overlaps
        another, and then marks nothing.
        """
        assert self.free_bytes == len(self._segments) * self.segment_bytes, "not wholly free"
        order = np.argsort(offsets_bytes)
        begins = np.asarray(offsets_bytes, np.uint64)[order]
        lengths = np.asarray(lengths_bytes, np.uint64)[order]
        self._check_ranges(begins, lengths)
        self._keep_gaps(begins // BLOCK_BYTES, (begins + lengths) // BLOCK_BYTES)

    def _check_ranges(
        self, begins: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]
    ) -> None:
        """Raise `ValueError` for the first of these, in the volume's order, that cannot be."""
        numbers, skips = np.divmod(begins, np.uint64(self.segment_bytes))
        segments = np.fromiter(self._segments, np.uint64, len(self._segments))
        fits = np.isin(numbers, segments) & (lengths > 0) & (lengths <= self.segment_bytes)
        fits &= (begins % BLOCK_BYTES == 0) & (lengths % BLOCK_BYTES == 0)
        fits[fits] = skips[fits] + lengths[fits] <= self.segment_bytes
        _raise_for_first(~fits, begins, lengths, "is not within a segment")
        overlaps = np.zeros(len(begins), np.bool_)
        overlaps[1:] = begins[:-1] + lengths[:-1] > begins[1:]
        _raise_for_first(overlaps, begins, lengths, "overlaps the one before it")

    def _keep_gaps(
        self, taken_begins: npt.NDArray[np.uint64], taken_ends: npt.NDArray[np.uint64]
    ) -> None:
        """Free is what lies between the sorted taken ranges (in blocks)."""
        segments = np.array(sorted(self._segments), np.uint64) * np.uint64(self._segment_blocks)
        begins = np.sort(np.concatenate([segments, taken_ends]))
        ends = np.sort(np.concatenate([taken_begins, segments + np.uint64(self._segment_blocks)]))
        gaps = begins < ends
        free_begins: list[int] = begins[gaps].tolist()
        free_blocks: list[int] = (ends - begins)[gaps].tolist()
        self._runs = SortedDict(zip(free_begins, free_blocks, strict=True))
        self._by_length = SortedList(map(_key, free_blocks, free_begins))
        self.free_bytes = sum(free_blocks) * BLOCK_BYTES

    # --- one extent ---

    def allocate(self, length_bytes: int) -> int | None:
        """Take a run: its offset in bytes, or None where none is long enough. O(log n)."""
        blocks = _blocks(length_bytes)
        position = self._by_length.bisect_left(_key(blocks, 0))
        if position == len(self._by_length):
            return None
        begin: int = self._by_length[position] & ((1 << OFFSET_BITS) - 1)
        over_blocks = self._remove_run(begin) - blocks
        if over_blocks:
            self._add_run(begin + blocks, over_blocks)
        return begin * BLOCK_BYTES

    def free(self, offset_bytes: int, length_bytes: int) -> None:
        """Give a run back, or a part of one. O(log n)."""
        assert offset_bytes % BLOCK_BYTES == 0, offset_bytes
        begin, blocks = offset_bytes // BLOCK_BYTES, _blocks(length_bytes)
        end = begin + blocks
        segment = begin // self._segment_blocks
        segment_end = (segment + 1) * self._segment_blocks
        assert segment in self._segments, f"no segment {segment}"
        assert end <= segment_end, "beyond the segment's end"
        before_end, before_begin, after_begin = self._neighbours(begin)
        assert before_end <= begin, f"{offset_bytes} is free already"
        assert after_begin is None or after_begin >= end, "its end is free already"

        if before_end == begin and begin % self._segment_blocks:
            begin = before_begin
            blocks += self._remove_run(begin)
        if after_begin == end and end < segment_end:
            blocks += self._remove_run(end)
        self._add_run(begin, blocks)

    def _neighbours(self, block: int) -> tuple[int, int, int | None]:
        """End and begin of the last run that begins at or before a block, begin of the next one."""
        position = self._runs.bisect_right(block)
        before_begin, before_blocks = self._runs.peekitem(position - 1) if position else (-1, 0)
        after = self._runs.peekitem(position)[0] if position < len(self._runs) else None
        return before_begin + before_blocks, before_begin, after

    # --- views ---

    @property
    def largest_free_bytes(self) -> int:
        """The longest run; 0 where nothing is free."""
        if not self._by_length:
            return 0
        longest: int = self._by_length[-1]
        return (longest >> OFFSET_BITS) * BLOCK_BYTES

    def free_runs(self) -> Iterator[tuple[int, int]]:
        """Every free (offset, length) in bytes, in the volume's order."""
        for begin, blocks in self._runs.items():
            yield begin * BLOCK_BYTES, blocks * BLOCK_BYTES

    # --- runs, in blocks ---

    def _add_run(self, begin: int, blocks: int) -> None:
        self._runs[begin] = blocks
        self._by_length.add(_key(blocks, begin))
        self.free_bytes += blocks * BLOCK_BYTES

    def _remove_run(self, begin: int) -> int:
        blocks: int = self._runs.pop(begin)
        self._by_length.remove(_key(blocks, begin))
        self.free_bytes -= blocks * BLOCK_BYTES
        return blocks


def _key(blocks: int, begin: int) -> int:
    """Orders runs by length, then by place. One number sorts several times faster than a pair."""
    return blocks << OFFSET_BITS | begin


def _blocks(length_bytes: int) -> int:
    assert length_bytes > 0, length_bytes
    assert length_bytes % BLOCK_BYTES == 0, length_bytes
    return length_bytes // BLOCK_BYTES


def _raise_for_first(
    bad: npt.NDArray[np.bool_],
    begins: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
    what: str,
) -> None:
    if bad.any():
        first = int(np.argmax(bad))
        raise ValueError(f"the range of {lengths[first]} bytes at {begins[first]} {what}")
