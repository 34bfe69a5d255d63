"""How far simulations are, said on standard error while they go on.

How long a delivery takes to simulate depends on how many share the link with it and on the policy,
by a factor of ten: what is left is told from what has ended, and not before.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

FIRST_S = 2.0  # since the first end: the processes' start tells nothing of what is left
EVERY_S = 1.0  # before a terminal, where a line replaces the one before it


class SimulationProgress:
    """Of some runs of as many deliveries each."""

    def __init__(
        self,
        run_count: int,
        delivery_count: int,
        ended: Callable[[], int],
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`ended` says how many deliveries of all runs together have ended."""
        self._run_count = run_count
        self._delivery_count = delivery_count
        self._ended = ended
        self._clock_s = clock_s
        self._begun_s = clock_s()
        self._next_s = 0.0
        self._first: tuple[float, int] | None = None  # when ends were seen first, and how many
        self._runs_ended = 0

    def begin(self, processes: int) -> None:
        """Say what is simulated."""
        runs = f"{self._run_count} runs" if self._run_count > 1 else "one run"
        count = self._delivery_count
        deliveries = f"{count:,} deliveries" if count != 1 else "one delivery"
        at_once = f", {processes} at once" if processes > 1 else ""
        _say(f"simulating {runs} of {deliveries}{at_once}")

    def look(self) -> None:
        """Say how much has ended and what is left, where it is time to: once between two runs'
        ends, and more often before a terminal.
        """
        now_s = self._clock_s()
        if now_s < self._next_s:
            return
        ended = self._ended()
        if self._first is None:
            if ended:
                self._first, self._next_s = (now_s, ended), now_s + FIRST_S
        elif left := self._left(now_s, ended):
            part = ended / (self._run_count * self._delivery_count)
            _say(f"{part:.0%} after {now_s - self._begun_s:.1f} s{left}")
            self._next_s = now_s + EVERY_S if sys.stderr.isatty() else math.inf

    def run_ended(self, name: str) -> None:
        """Say that a run has ended."""
        self._runs_ended += 1
        now_s = self._clock_s()
        left = self._left(now_s, self._ended()) if self._runs_ended < self._run_count else ""
        after = f"after {now_s - self._begun_s:.1f} s"
        _say(f"{self._runs_ended} of {self._run_count} {after}{left}: {name}")

    def end(self) -> None:
        """Leave a terminal's line empty."""
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _left(self, now_s: float, ended: int) -> str:
        """What is left at the rate since the first ends were seen; empty where there is none."""
        first_s, first = self._first or (now_s, ended)
        if ended == first or now_s - first_s < FIRST_S:
            return ""
        total = self._run_count * self._delivery_count
        return f", about {(now_s - first_s) * (total - ended) / (ended - first):.0f} s to go"


def _say(text: str) -> None:
    """In the place of what was said last before a terminal, in a line of its own elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)
