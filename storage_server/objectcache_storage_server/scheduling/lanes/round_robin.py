"""Weighted deficit round robin: shares in proportion to weights, a fragment's length at most apart.

A fragment is charged after it was chosen, so that its length need not be known before: whoever is
overdrawn lets the others pass until its rounds have paid for it (Shreedhar and Varghese, 1995, in
the form that is called surplus round robin).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

QUANTUM_BYTES = 1 << 20  # that weight 1 gets each round


class DeficitRoundRobin(Generic[ItemT]):
    """Items take turns. An item that leaves forfeits its deficit and its debt."""

    def __init__(self) -> None:
        self._deficits: OrderedDict[ItemT, float] = OrderedDict()  # in order of the turns
        self._weights: dict[ItemT, float] = {}

    def __len__(self) -> int:
        return len(self._deficits)

    def __contains__(self, item: ItemT) -> bool:
        return item in self._weights

    def add(self, item: ItemT, weight: float) -> None:
        """Join the round, at its end; changes the weight of an item that is in it."""
        assert weight > 0
        if item not in self._weights:
            self._deficits[item] = QUANTUM_BYTES * weight
        self._weights[item] = weight

    def discard(self, item: ItemT) -> None:
        """Leave the round; no effect on an item that is not in it."""
        if item in self._weights:
            del self._weights[item], self._deficits[item]

    def turn(self) -> ItemT | None:
        """Whose turn it is; None where the round is empty."""
        passed = 0
        while self._deficits:
            item, deficit = next(iter(self._deficits.items()))
            if deficit > 0:
                return item
            self._deficits[item] = deficit + QUANTUM_BYTES * self._weights[item]
            self._deficits.move_to_end(item)
            passed += 1
            if passed == len(self._deficits):
                self._skip_rounds()
                passed = 0
        return None

    def _skip_rounds(self) -> None:
        """Pay at once for the rounds in which nobody would have a turn."""
        rounds = min(
            math.floor(-deficit / (QUANTUM_BYTES * self._weights[item]))
            for item, deficit in self._deficits.items()
        )
        if rounds > 0:
            for item, weight in self._weights.items():
                self._deficits[item] += rounds * QUANTUM_BYTES * weight

    def charge(self, item: ItemT, length_bytes: int) -> None:
        """The item, which is in the round, was served."""
        self._deficits[item] -= length_bytes

    def __repr__(self) -> str:
        return f"<DeficitRoundRobin {len(self._deficits)} items>"
