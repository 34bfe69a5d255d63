"""How often something happened lately, for a health that says what goes on. Pure."""

from __future__ import annotations

RECENT_S = 60.0  # after so long without another one it is over


class RecentCount:
    """Counts what happens until nothing has for RECENT_S; for one thread."""

    def __init__(self) -> None:
        self._count = 0
        self._last_s = 0.0

    def add(self, now_s: float, count: int = 1) -> None:
        """It happened, so many times."""
        self._count = self.at(now_s) + count
        self._last_s = now_s

    def at(self, now_s: float) -> int:
        """How often it has happened since it began; 0 where it is over."""
        return self._count if now_s < self._last_s + RECENT_S else 0

    def __repr__(self) -> str:
        return f"<RecentCount {self._count}, the last at {self._last_s:.0f} s>"
