"""How many messages of one session are read: tokens, of which each takes one.

Pure: the time is an argument.
"""

from __future__ import annotations

BURST_S = 2.0  # of the rate may come at once
PAUSE_S = 0.01  # the shortest, so that a session over its rate is seldom woken


class MessagePace:
    """The tokens of one session."""

    def __init__(self, rate_per_s: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._most = max(1.0, rate_per_s * BURST_S)
        self._left = self._most
        self._since_s = now_s

    def count(self, now_s: float) -> float:
        """Count a message that was read; returns the seconds for which no more may be read."""
        earned = max(0.0, now_s - self._since_s) * self._rate_per_s
        self._since_s = max(self._since_s, now_s)
        self._left = min(self._most, self._left + earned) - 1
        if self._left >= 1:
            return 0.0
        return max((1 - self._left) / self._rate_per_s, PAUSE_S)

    def __repr__(self) -> str:
        return f"<MessagePace {self._left:.0f}/{self._most:.0f}, {self._rate_per_s:g} a second>"
