"""How long a body may keep the gateway waiting. Pure."""

from __future__ import annotations


class ArrivalBudget:
    """Time that waiting for a body uses up and that its bytes earn back.

    A client may be silent for `wait_s_max`, and a body that arrives at `rate_bytes_per_s_min` may
    take for ever; a slower one uses up its budget, however it spreads its bytes. Only time that was
    spent waiting for the client counts. With a rate of 0 every byte earns the whole budget.
    """

    def __init__(self, wait_s_max: float, rate_bytes_per_s_min: int) -> None:
        self._wait_s_max = wait_s_max
        self._rate_bytes_per_s_min = rate_bytes_per_s_min
        self.left_s = wait_s_max

    def arrived(self, received_bytes: int, waited_s: float) -> None:
        """So many bytes came after a wait; `left_s` is how long the next wait may be."""
        self.left_s = min(self.left_s - waited_s + self._earned_s(received_bytes), self._wait_s_max)

    def _earned_s(self, received_bytes: int) -> float:
        if self._rate_bytes_per_s_min:
            return received_bytes / self._rate_bytes_per_s_min
        return self._wait_s_max if received_bytes else 0.0

    def __repr__(self) -> str:
        return f"<ArrivalBudget {self.left_s:.1f} of {self._wait_s_max:g} s left>"
