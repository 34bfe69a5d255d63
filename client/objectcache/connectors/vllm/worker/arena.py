"""Slots in one piece of memory, handed out in runs."""

from __future__ import annotations


class Arena:
    """`slot_count` slots. A run goes to the first gap that holds it; not thread-safe."""

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self._gaps: list[tuple[int, int]] = [(0, slot_count)] if slot_count else []  # begin, end

    @property
    def free_count(self) -> int:
        """Slots that are free, in however many gaps."""
        return sum(end - begin for begin, end in self._gaps)

    def take(self, count: int) -> int | None:
        """The first slot of `count` in a run; None where no gap is as long."""
        for index, (begin, end) in enumerate(self._gaps):
            if end - begin >= count:
                rest = [(begin + count, end)] if begin + count < end else []
                self._gaps[index : index + 1] = rest
                return begin
        return None

    def give_back(self, begin: int, count: int) -> None:
        """Slots that were taken are free again."""
        gaps = sorted([*self._gaps, (begin, begin + count)])
        merged: list[tuple[int, int]] = []
        for gap in gaps:
            if merged and merged[-1][1] == gap[0]:
                merged[-1] = (merged[-1][0], gap[1])
            else:
                merged.append(gap)
        self._gaps = merged

    def __repr__(self) -> str:
        return f"<Arena {self.free_count}/{self.slot_count} free>"
