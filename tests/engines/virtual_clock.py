"""Time that passes only where a test says so: what an engine computes takes exactly that long,
whatever else goes on in the machine.
"""

from __future__ import annotations

import pytest

from objectcache.connectors.timing.moments import HostClock
from objectcache.connectors.timing.step_windows import StepWindows

WAIT_S = 0.7  # for a layer, which is no part of what the engine computes


class VirtualClock:
    """Stands for `time` in an emulated engine, and for the clock by which connectors time it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = 0.0
        monkeypatch.setattr(HostClock, "now", lambda _: self._now_s)
        wait_begins = StepWindows.wait_begins

        def waits(windows: StepWindows) -> None:
            wait_begins(windows)
            self.sleep(WAIT_S)

        monkeypatch.setattr(StepWindows, "wait_begins", waits)

    def monotonic(self) -> float:
        """Seconds."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """So many pass."""
        self._now_s += seconds
