"""A set of bytes of a volume, as ranges that neither overlap nor touch. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sortedcontainers import SortedDict


class ByteRanges:
    """Ranges are [begin, end); empty ones count for nothing. Each method is O(log n) and what it
    gives out or takes away.
    """

    def __init__(self) -> None:
        self._ends: Any = SortedDict()  # int to int: where a range begins, where it ends

    def __repr__(self) -> str:
        return f"<ByteRanges {len(self._ends)} of {sum(end - begin for begin, end in self)} bytes>"

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(self._ends.items()))

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, begin: int, end: int) -> None:
        """Take these bytes in."""
        if begin >= end:
            return
        for first, last in self._touching(begin, end):
            begin, end = min(begin, first), max(end, last)
            del self._ends[first]
        self._ends[begin] = end

    def remove(self, begin: int, end: int) -> None:
        """Leave these bytes out."""
        if begin >= end:
            return
        for first, last in self._touching(begin, end):
            del self._ends[first]
            if first < begin:
                self._ends[first] = min(last, begin)
            if last > end:
                self._ends[max(first, end)] = last

    def add_all(self, others: ByteRanges) -> None:
        """Take in what others have."""
        for begin, end in others:
            self.add(begin, end)

    def covers(self, begin: int, end: int) -> bool:
        """Whether all of these bytes are in it."""
        return begin >= end or self.within(begin, end) == [(begin, end)]

    def overlaps(self, begin: int, end: int) -> bool:
        """Whether any of these bytes is in it."""
        return bool(self.within(begin, end))

    def within(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Which of these bytes are in it, in order."""
        cut = ((max(begin, first), min(end, last)) for first, last in self._touching(begin, end))
        return [(first, last) for first, last in cut if first < last]

    def missing(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Which of these bytes are not in it, in order."""
        found: list[tuple[int, int]] = []
        for first, last in (*self.within(begin, end), (end, end)):
            if begin < first:
                found.append((begin, first))
            begin = last
        return found

    def _touching(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The ranges that overlap or touch [begin, end)."""
        before = self._ends.bisect_right(begin) - 1
        least = self._ends.keys()[before] if before >= 0 else begin
        found = ((first, self._ends[first]) for first in self._ends.irange(least, end))
        return [(first, last) for first, last in found if last >= begin]
