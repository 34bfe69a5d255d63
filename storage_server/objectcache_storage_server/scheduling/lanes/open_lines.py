"""Whose turn it is among the lines of many NICs."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Generic

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.due_part import DueLine
from objectcache_storage_server.scheduling.lanes.keyed_line import VOID_MIN, KeyedLine
from objectcache_storage_server.scheduling.lanes.nic_paces import Nic

_Entry = tuple[tuple[bool, float], int, DueLine[JobT]]


class OpenLines(Generic[JobT]):
    """Lines by the place of their first flow, and those of full NICs by when they open.

    Nothing looks at all of them. A line that has changed is entered anew when it is asked whose
    turn it is; what was entered before is void.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._line_count = 0
        self._changed: dict[DueLine[JobT], None] = {}
        self._by_place: list[_Entry[JobT]] = []
        self._full: KeyedLine[DueLine[JobT]] = KeyedLine()

    def new_line(self, nic: Nic | None) -> DueLine[JobT]:
        """Among equals it is the last."""
        self._line_count += 1
        return DueLine(nic, next(self._numbers), self._changed)

    def forget(self, line: DueLine[JobT]) -> None:
        """It is empty, and will not be used again."""
        self._line_count -= 1
        self._changed.pop(line, None)
        self._full.discard(line)

    def opens_otherwise(self, line: DueLine[JobT]) -> None:
        """Its NIC may be sent something sooner, or later, than it could."""
        if line in self._full:
            self._full.put(line, line.opens_at_s)

    def first(self, now_s: float) -> Flow[JobT] | None:
        """Whose turn it is of those whose NICs are not full."""
        while (full := self._full.first()) is not None and full[0] <= now_s:
            self._full.discard(full[1])
            self._enter(full[1])
        while self._changed:
            line, _ = self._changed.popitem()
            line.is_changed = False
            self._enter(line)
        while self._by_place:
            place, _, line = self._by_place[0]
            first = line.first()
            if first is not None and first[0] == place:
                if line.nic is None or (opens_at_s := line.opens_at_s) <= now_s:
                    return first[1]
                self._full.put(line, opens_at_s)
            heapq.heappop(self._by_place)
        return None

    def next_at_s(self) -> float:
        """When the next NIC is not full; infinity where none is. Asked after `first` has found
        nobody.
        """
        while (full := self._full.first()) is not None:
            if full[1].first() is not None:
                return full[0]
            self._full.discard(full[1])
        return math.inf

    def _enter(self, line: DueLine[JobT]) -> None:
        if (first := line.first()) is None or line in self._full:
            return
        heapq.heappush(self._by_place, (first[0], line.number, line))
        if len(self._by_place) > 2 * self._line_count + VOID_MIN:
            self._clear_void()

    def _clear_void(self) -> None:
        lines = {entry[1]: entry[2] for entry in self._by_place}
        self._by_place = [
            (first[0], number, line)
            for number, line in lines.items()
            if (first := line.first()) is not None
        ]
        heapq.heapify(self._by_place)

    def __repr__(self) -> str:
        return f"<OpenLines: {len(self._by_place)} entered, {len(self._full)} full>"
