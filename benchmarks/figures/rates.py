"""Rates out of stamps: when bytes were in place. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

WINDOW_S = 0.2


class Stamp(NamedTuple):
    """These bytes were in place at that time, and none of them before `since_s`."""

    at_s: float
    length_bytes: int
    since_s: float


def at_once(at_s: float, length_bytes: int) -> Stamp:
    """Bytes that come in one piece, small beside what is measured."""
    return Stamp(at_s, length_bytes, at_s)


def spread(times_s: Sequence[float], piece_bytes: int) -> list[Stamp]:
    """Large pieces one after another, each coming evenly since the one before; the first one, of
    which nobody knows, since the first time.
    """
    pairs = itertools.pairwise(times_s)
    return [Stamp(at_s, piece_bytes, since_s) for since_s, at_s in pairs]


def achieved_bytes_per_s(stamps: Sequence[Stamp]) -> float:
    """From the first stamp to the last; the first one's bytes came before it."""
    ordered = sorted(stamps)
    first, last = ordered[0], ordered[-1]
    begun_s = first.since_s
    counted = ordered if first.since_s < first.at_s else ordered[1:]
    return sum(stamp.length_bytes for stamp in counted) / (last.at_s - begun_s)


def longest_gap_s(stamps: Sequence[Stamp]) -> float:
    """Between two stamps in a row."""
    times = sorted(stamp.at_s for stamp in stamps)
    return max(after - before for before, after in itertools.pairwise(times))


def most_in_window(stamps: Sequence[Stamp], window_s: float = WINDOW_S) -> float:
    """The most bytes that came within any `window_s`."""
    edges = sorted({stamp.at_s for stamp in stamps} | {stamp.since_s for stamp in stamps})
    ends = [*edges, *(edge + window_s for edge in edges)]
    whole = _Cumulated(stamps)
    return max(whole.until(end_s) - whole.before(end_s - window_s) for end_s in ends)


class _Cumulated:
    """Bytes by time: steps, and slopes for what came evenly."""

    def __init__(self, stamps: Sequence[Stamp]) -> None:
        self._steps = sorted((s.at_s, s.length_bytes) for s in stamps if s.since_s == s.at_s)
        self._slopes = [stamp for stamp in stamps if stamp.since_s < stamp.at_s]
        self._times = [at_s for at_s, _ in self._steps]
        self._sums = [0]
        for _, length_bytes in self._steps:
            self._sums.append(self._sums[-1] + length_bytes)

    def until(self, at_s: float) -> float:
        """Bytes until then, that time among it."""
        return self._sums[bisect_right(self._times, at_s)] + self._sloped(at_s)

    def before(self, at_s: float) -> float:
        """Bytes until then, without that time."""
        return self._sums[bisect_left(self._times, at_s)] + self._sloped(at_s)

    def _sloped(self, at_s: float) -> float:
        return sum(
            s.length_bytes * min(1.0, max(0.0, (at_s - s.since_s) / (s.at_s - s.since_s)))
            for s in self._slopes
        )
