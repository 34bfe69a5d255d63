"""Virtual time: calls at moments, and processes that wait. The same order in every run."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import TypeAlias

Process: TypeAlias = Generator["float | Bell", None, None]


class Bell:
    """Wakes whoever waits for it."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def wait(self, wake: Callable[[], None]) -> None:
        """Call this once, at the next ring."""
        self._waiting.append(wake)

    def ring(self) -> None:
        """Wake all that wait now."""
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


class VirtualClock:
    """What happens when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, moment_s: float, call: Callable[[], None]) -> None:
        """Call it then, after what was asked for before at the same moment."""
        heapq.heappush(self._due, (max(moment_s, self.now_s), next(self._numbers), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it so much later."""
        self.at(self.now_s + delay_s, call)

    def start(self, process: Process, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Run a process, which yields how long it waits, or for which bell; it ends where it would
        be woken and does not go on.
        """

        def step() -> None:
            if not goes_on():
                process.close()
                return
            waits = next(process, None)
            if isinstance(waits, Bell):
                waits.wait(lambda: self.after(0, step))
            elif waits is not None:
                self.after(waits, step)

        self.after(0, step)

    def run(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Until nothing is due, or it is not to go on."""
        while self._due and goes_on():
            self.now_s, _, call = heapq.heappop(self._due)
            call()

    def __repr__(self) -> str:
        return f"<VirtualClock {self.now_s:.3f} s, {len(self._due)} due>"
