"""How evenly the storage NICs were given bytes lately. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

WINDOW_S = 5.0  # as the paper's figures of balance
SLOT_S = 0.5


class RecentReads:
    """Bytes by node of the last WINDOW_S, in slots of SLOT_S; `now_s` never goes back."""

    def __init__(self) -> None:
        self._slots = deque[tuple[int, Counter[str]]]()

    def add(self, node: str, read_bytes: int, now_s: float) -> None:
        """A node was given these bytes to read."""
        slot = int(now_s / SLOT_S)
        self._forget(slot)
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
        self._slots[-1][1][node] += read_bytes

    def imbalance(self, nodes: Collection[str], now_s: float) -> float:
        """The most that one of these nodes was given over their mean; 1 where nothing was."""
        self._forget(int(now_s / SLOT_S))
        given = Counter[str]()
        for _, slot in self._slots:
            given.update(slot)
        of_nodes = [given[node] for node in nodes]
        total = sum(of_nodes)
        return max(of_nodes) * len(of_nodes) / total if total else 1.0

    def _forget(self, slot: int) -> None:
        while self._slots and self._slots[0][0] <= slot - WINDOW_S / SLOT_S:
            self._slots.popleft()
