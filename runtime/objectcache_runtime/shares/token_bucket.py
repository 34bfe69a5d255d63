"""Tokens that are earned at a rate, and spent one at a time. Pure: the time is an argument."""

from __future__ import annotations


class TokenBucket:
    """Full, it holds what the rate earns in `burst_s`, and at least one. The rate may be another
    each time.
    """

    __slots__ = ("_burst_s", "_since_s", "left")

    def __init__(self, rate_per_s: float, burst_s: float, now_s: float) -> None:
        self._burst_s = burst_s
        self._since_s = now_s
        self.left = max(1.0, rate_per_s * burst_s)

    def earn(self, rate_per_s: float, now_s: float) -> None:
        """Bring `left` up to date."""
        earned = max(0.0, now_s - self._since_s) * rate_per_s
        self.left = min(max(1.0, rate_per_s * self._burst_s), self.left + earned)
        self._since_s = max(self._since_s, now_s)

    def wait_s(self, rate_per_s: float) -> float:
        """Seconds until there is one."""
        return (1 - self.left) / rate_per_s

    def __repr__(self) -> str:
        return f"<TokenBucket {self.left:.1f} left>"
