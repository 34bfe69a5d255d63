"""How fast bytes come in."""

from __future__ import annotations

import math

RATE_MEMORY_S = 3.0
IDLE_S_MAX = 10.0  # links change, and who was slow once would not be asked again


class ReceivedRate:
    """Bytes per second while something is awaited; what was long ago counts less, and nothing
    where nothing was awaited for IDLE_S_MAX. A shorter idle time changes no rate, but the next
    bytes say more. Time is an argument.
    """

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._busy_s = 0.0
        self._bytes = 0.0
        self._awaits = False

    def note(self, now_s: float, received_bytes: int, *, awaits: bool) -> None:
        """So much came since the last call; `awaits` tells whether more is to come."""
        passed_s = max(0.0, now_s - self._looked_s)
        fading = 0.0 if self._is_forgotten(now_s) else math.exp(-passed_s / RATE_MEMORY_S)
        self._busy_s = self._busy_s * fading + (passed_s if self._awaits else 0.0)
        self._bytes = self._bytes * fading + received_bytes
        self._looked_s, self._awaits = now_s, awaits

    def rate_bytes_per_s(self, now_s: float) -> float:
        """0 where nothing has come, or nothing was awaited lately."""
        if self._busy_s <= 0 or self._is_forgotten(now_s):
            return 0.0
        return self._bytes / self._busy_s

    def _is_forgotten(self, now_s: float) -> bool:
        return not self._awaits and now_s - self._looked_s > IDLE_S_MAX
