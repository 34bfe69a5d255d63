"""Virtual time: a heap of what happens when; of one time in the order in which it was said."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualTime:
    """`now_s` is the time of the event that happens."""

    __slots__ = ("_heap", "_number", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        """Not before now."""
        self._number += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._number, happen))

    def run(self, until_s: float = float("inf")) -> None:
        """All events up to a time, those that they cause too."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, happen = heapq.heappop(heap)
            happen()

    def __repr__(self) -> str:
        return f"<VirtualTime {self.now_s:.3f} s, {len(self._heap)} events to come>"
