"""How old records are at least, by when this process first knew of them. Pure.

No wall clock is asked, and no other server's: a record was there when the log was seen to end
behind it. A process that has just started takes everything for new.
"""

from __future__ import annotations

from bisect import bisect_right

FINENESS = 64  # an age may be taken for less by one part in so many


class LogAges:
    """Ends of the log, and when each was first seen. Old ones are kept less close together."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []  # time and end, both growing

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, end: int, now_s: float) -> None:
        """The log is known to have records below `end`; times never become smaller."""
        if not self._seen or end > self._seen[-1][1]:
            self._seen.append((now_s, end))
            self._thin_out(now_s)

    def end_before(self, age_s: float, now_s: float) -> int:
        """Records below this number are at least so old; 0 where none is known to be."""
        place = bisect_right(self._seen, now_s - age_s, key=_time)
        return self._seen[place - 1][1] if place else 0

    def age_s(self, number: int, now_s: float) -> float:
        """How old a record is at least."""
        place = bisect_right(self._seen, number, key=_end)
        return now_s - self._seen[place][0] if place < len(self._seen) else 0.0

    @property
    def first_end(self) -> int:
        """What the log ended with when it was first seen."""
        return self._seen[0][1] if self._seen else 0

    def _thin_out(self, now_s: float) -> None:
        """Keep of neighbours, seen from now, only what tells their ages apart."""
        if len(self._seen) & (FINENESS - 1):
            return
        kept = self._seen[:1]
        for before, after in zip(self._seen[1:-1], self._seen[2:], strict=True):
            if (after[0] - kept[-1][0]) * FINENESS > now_s - after[0]:
                kept.append(before)
        self._seen = [*kept, *self._seen[-1:]]


def _time(seen: tuple[float, int]) -> float:
    return seen[0]


def _end(seen: tuple[float, int]) -> int:
    return seen[1]
