"""How much a server has moved lately, by which gateways choose between servers. Pure."""

from __future__ import annotations

import math

FADES_S = 10.0  # after which a request counts for 1/e: ten times what gateways know of it is old


class RecentBytes:
    """Bytes of gets and puts, and how many these are, from when each begins; what was long ago
    counts for less. For one thread.
    """

    def __init__(self) -> None:
        self._bytes = 0.0
        self._requests = 0.0
        self._counted_s = 0.0

    def add(self, size_bytes: int, now_s: float) -> None:
        """A get or put of this size begins."""
        fading = self._fading(now_s)
        self._bytes = self._bytes * fading + size_bytes
        self._requests = self._requests * fading + 1
        self._counted_s = now_s

    def at(self, now_s: float) -> tuple[int, float]:
        """The bytes and the requests."""
        fading = self._fading(now_s)
        return round(self._bytes * fading), self._requests * fading

    def _fading(self, now_s: float) -> float:
        return math.exp(-max(0.0, now_s - self._counted_s) / FADES_S)

    def __repr__(self) -> str:
        return f"<RecentBytes {self._bytes:.0f} in {self._requests:.1f} requests>"
