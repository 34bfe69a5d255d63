"""One direction of a server's link, shared evenly by what is under way."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from benchmarks.scale_out.virtual_clock import VirtualClock


class SharedPipe:
    """Carries transfers, each at the same share of the rate."""

    def __init__(self, clock: VirtualClock, bytes_per_s: float) -> None:
        self._carried_bytes = 0.0
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._numbers = itertools.count()
        self._each_bytes = 0.0  # that any transfer has had which was there from the beginning
        self._counted_s = 0.0  # up to when that is
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0  # the plan for the next end that counts; later ones replace it

    @property
    def carried_bytes(self) -> float:
        """Until now."""
        self._count()
        return self._carried_bytes

    def carry(self, size_bytes: float, ended: Callable[[], None]) -> None:
        """Call `ended` when so many bytes are through."""
        self._count()
        ends_at = self._each_bytes + size_bytes
        heapq.heappush(self._under_way, (ends_at, next(self._numbers), ended))
        self._plan()

    def _count(self) -> None:
        passed_s = self._clock.now_s - self._counted_s
        if self._under_way:
            carried_bytes = passed_s * self._bytes_per_s
            self._carried_bytes += carried_bytes
            self._each_bytes += carried_bytes / len(self._under_way)
        self._counted_s = self._clock.now_s

    def _plan(self) -> None:
        self._planned += 1
        if not self._under_way:
            return
        plan = self._planned
        left_bytes = max(0.0, self._under_way[0][0] - self._each_bytes)
        left_s = left_bytes * len(self._under_way) / self._bytes_per_s
        self._clock.after(left_s, lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._planned:
            return
        self._count()
        ends_at, _, ended = heapq.heappop(self._under_way)
        self._each_bytes = max(self._each_bytes, ends_at)
        self._plan()
        ended()
