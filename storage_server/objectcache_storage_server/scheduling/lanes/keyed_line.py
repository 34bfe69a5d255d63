"""Items in line by a key."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

VOID_MIN = 64  # entries of a line: fewer are not worth the clearing

ItemT = TypeVar("ItemT")


class KeyedLine(Generic[ItemT]):
    """Items by a key, the least first; an item stands in it once."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ItemT]] = []
        # The number of an item's entry, in order of the puts; other entries are void.
        self._valid: OrderedDict[ItemT, int] = OrderedDict()
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._valid)

    def __contains__(self, item: ItemT) -> bool:
        return item in self._valid

    def __len__(self) -> int:
        return len(self._valid)

    def put(self, item: ItemT, key: float) -> None:
        """Stand in line, or at another place than before; behind others of the same key."""
        number = next(self._numbers)
        self._valid[item] = number
        self._valid.move_to_end(item)
        heapq.heappush(self._heap, (key, number, item))
        if len(self._heap) > 2 * len(self._valid) + VOID_MIN:  # void entries keep items alive
            self._clear_void()

    def _clear_void(self) -> None:
        self._heap = [entry for entry in self._heap if self._valid.get(entry[2]) == entry[1]]
        heapq.heapify(self._heap)

    def discard(self, item: ItemT) -> None:
        """Leave the line; no effect on an item that is not in it."""
        if self._valid.pop(item, None) is not None and not self._valid:
            self._heap.clear()

    def first(self) -> tuple[float, ItemT] | None:
        """The least key and its item."""
        while self._heap:
            key, number, item = self._heap[0]
            if self._valid.get(item) == number:
                return key, item
            heapq.heappop(self._heap)
        return None

    def stalest(self) -> ItemT | None:
        """The item whose key is the oldest."""
        return next(iter(self._valid), None)

    def __repr__(self) -> str:
        return f"<Line of {len(self._valid)}>"
