"""How many messages of one session are read: tokens, of which each takes one.

Pure: the time is an argument.
"""

from __future__ import annotations

from objectcache_runtime.shares.token_bucket import TokenBucket

BURST_S = 2.0  # of the rate may come at once
PAUSE_S = 0.01  # the shortest, so that a session over its rate is seldom woken


class MessagePace:
    """The tokens of one session."""

    def __init__(self, rate_per_s: float, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._tokens = TokenBucket(rate_per_s, BURST_S, now_s)

    def count(self, now_s: float) -> float:
        """Count a message that was read; returns the seconds for which no more may be read."""
        self._tokens.earn(self._rate_per_s, now_s)
        self._tokens.left -= 1
        if self._tokens.left >= 1:
            return 0.0
        return max(self._tokens.wait_s(self._rate_per_s), PAUSE_S)

    def __repr__(self) -> str:
        most = max(1.0, self._rate_per_s * BURST_S)
        return f"<MessagePace {self._tokens.left:.0f}/{most:.0f}, {self._rate_per_s:g} a second>"
