"""Blocks of the engine that hold other KV than their hashes say, after a load that failed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any


class TaintedBlocks:
    """Which blocks may not be read, stored or found again, until they were computed again.

    vLLM computes the blocks of a failed load again, but leaves them in its own prefix cache until
    then: a request that ends, or is preempted, before that would leave them there for good. What
    was computed on them is tainted as they are. Called from the scheduler's thread alone.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._manager: Any = None

    def bind(self, manager: Any) -> None:
        """`manager` is vLLM's KVCacheManager, which is asked to forget the hashes of blocks."""
        self._manager = manager

    @property
    def bound(self) -> bool:
        """Whether there is a prefix cache to evict from."""
        return self._manager is not None

    def __len__(self) -> int:
        return len(self._ids)

    def failed(self, block_ids: Collection[int], tables: Iterable[Sequence[int]]) -> set[int]:
        """These blocks could not be loaded, and whatever comes behind one of them in a table was
        computed on it. Returns these, and those that were right before.
        """
        known = self._ids.difference(block_ids)
        self._ids.update(block_ids)
        rows = list(tables)
        before = -1
        while before < len(self._ids):  # a table may share what another one's step has spoilt
            before = len(self._ids)
            for table in rows:
                if (first := self.first_in(table)) is not None:
                    self._ids.update(table[first:])
        return self._ids - known

    def all_in_use(self) -> None:
        """The engine's weights are others now: every block that a request holds is tainted, and
        none is found again.
        """
        blocks = self._manager.block_pool.blocks
        self._ids = {block.block_id for block in blocks if block.ref_cnt > 0 and not block.is_null}
        self._manager.evict_blocks({block.block_id for block in blocks if not block.is_null})

    def first_in(self, table: Sequence[int]) -> int | None:
        """The place of the first tainted block of a table."""
        return next((place for place, block in enumerate(table) if block in self._ids), None)

    def first_held(self, request_id: str, block_ids: Collection[int]) -> int | None:
        """The place of the first of these blocks in a request's table."""
        if self._manager is None:
            return None
        table = self._manager.get_block_ids(request_id)[0]
        return next((place for place, block in enumerate(table) if block in block_ids), None)

    def loaded(self, block_ids: Iterable[int]) -> None:
        """These are filled from the store, and computed again where that fails, before they are
        read.
        """
        self._ids.difference_update(block_ids)

    def step(self, table: Sequence[int], loaded: Iterable[int], begin: int, end: int) -> bool:
        """A step fills the blocks at `loaded` from the store, reads those before the place `begin`
        and computes those from there to `end`. True where what it computes is right.

        A block that another request computes in the same step counts as tainted still.
        """
        self._ids.difference_update(loaded)
        if self._ids.isdisjoint(table[:begin]):
            self._ids.difference_update(table[begin:end])
            return True
        self._ids.update(table[begin:end])
        return False

    def evict(self) -> None:
        """Have no request find a tainted block; forget those that no request holds any more, which
        are written before they are read.
        """
        if self._manager is None or not self._ids:
            return
        self._manager.evict_blocks(self._ids)
        blocks = self._manager.block_pool.blocks
        self._ids = {number for number in self._ids if blocks[number].ref_cnt > 0}

    def __repr__(self) -> str:
        return f"<TaintedBlocks {len(self._ids)}>"


class OpenSteps:
    """The block tables of requests that began since the oldest load that is not known to be whole.

    Nothing but these can hold what such a load spoils, and by the time it is known to have failed
    a request may be gone, and its blocks with it.
    """

    def __init__(self) -> None:
        self._loading: set[int] = set()
        self._begun: set[str] = set()
        self._tables: list[tuple[int, ...]] = []

    def begins(self, request_id: str, loads: bool) -> None:
        """A request is given its blocks, in the step that is scheduled now."""
        if loads or self._loading or self._begun:
            self._begun.add(request_id)

    def planned(self, step: int, loads: bool, scheduled: Iterable[str], blocks: Any) -> None:
        """A step is scheduled. `blocks.get_block_ids(request_id)` is a request's table."""
        if loads:
            self._loading.add(step)
        if not self._loading:
            return
        for request_id in self._begun.intersection(scheduled):
            self._tables.append(tuple(blocks.get_block_ids(request_id)[0]))

    def tables(self) -> list[tuple[int, ...]]:
        """Every table that a step had since then."""
        return list(self._tables)

    def reported(self, steps: set[int]) -> None:
        """The workers are through with these steps."""
        self._loading -= steps
        if not self._loading:
            self._begun.clear()
            self._tables.clear()

    def __repr__(self) -> str:
        return f"<OpenSteps {sorted(self._loading)}>"
