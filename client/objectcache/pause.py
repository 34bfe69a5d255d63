"""How long what failed is left alone."""

from __future__ import annotations

PAUSE_MIN_S, PAUSE_MAX_S = 1.0, 30.0


class Pause:
    """How long a store, or a relay, that failed is left alone: twice as long as the last time,
    until what failed has gone well again. Time is an argument.
    """

    def __init__(self) -> None:
        self._until_s = float("-inf")
        self._next_s = PAUSE_MIN_S
        self._failing: set[str] = set()

    def rest_s(self, now_s: float) -> float:
        """How much longer nothing should be asked; 0 where the store may be asked."""
        return max(0.0, self._until_s - now_s)

    def failed(self, what: str, now_s: float, least_s: float = 0.0) -> None:
        """An operation of this kind failed. What was under way when a pause began, and fails in it,
        does not make it longer, unless the server asked for `least_s`.
        """
        self._failing.add(what)
        if self.rest_s(now_s) == 0.0:
            self._until_s = now_s + self._next_s
            self._next_s = min(2 * self._next_s, PAUSE_MAX_S)
        self._until_s = max(self._until_s, now_s + min(least_s, PAUSE_MAX_S))

    def answered(self, what: str) -> None:
        """An operation of this kind went well. One kind says nothing about another: lookups may be
        answered by a server whose deliveries fail.
        """
        self._failing.discard(what)
        if not self._failing:
            self._next_s = PAUSE_MIN_S
