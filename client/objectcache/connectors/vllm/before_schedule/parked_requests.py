"""Requests that the engine has parked until their KV is there, as its scheduler knows them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from objectcache.connectors.store.load_budget import LoadBudget
from objectcache.connectors.vllm.plans import LoadPlan


class ParkedRequests:
    """From a request's blocks being allocated until every rank has told of its load's end. Memory
    is promised to a load for all of that time. Called from the scheduler's thread alone.
    """

    def __init__(self, budget: LoadBudget) -> None:
        self._budget = budget
        self._loading: dict[str, LoadPlan] = {}
        self._begun: list[LoadPlan] = []
        self._given_up: list[str] = []
        self._stale: set[str] = set()

    def park(self, load: LoadPlan) -> None:
        """A request has its blocks: begin to load with the next step."""
        self._loading[load.request_id] = load
        self._begun.append(load)

    def among(self, block_ids: Collection[int]) -> set[int]:
        """Those of these blocks that belong to a request that is loading. No other request has
        them.
        """
        held = (block for load in self._loading.values() for block in load.block_ids)
        return set(block_ids).intersection(held)

    def failed(self, block_ids: Collection[int]) -> None:
        """A rank could not load these. Of a request whose first one is among them none will come
        into the engine's prefix cache.
        """
        for name, load in self._loading.items():
            if load.block_ids[0] in block_ids:
                self._stale.discard(name)

    def ended(self, request_ids: Iterable[str]) -> None:
        """Every rank is through with these, and has told before what it could not load."""
        for name in request_ids:
            if (load := self._loading.pop(name, None)) is not None:
                self._budget.give_back(len(load.block_ids))

    def give_up(self, request_id: str) -> None:
        """The request is gone. Its blocks are free once its load has ended."""
        self._stale.discard(request_id)
        if request_id in self._loading:
            self._given_up.append(request_id)

    def outdate(self) -> None:
        """The weights are others now: whatever is under way is of the old ones."""
        self._given_up += self._loading
        self._stale.update(self._loading)

    def holds_outdated(self) -> bool:
        """Whether a load of the old weights may still come into the engine's prefix cache, where
        others would find it.
        """
        return bool(self._stale)

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """These compute in the step that is planned; their blocks are in the prefix cache, and out
        of it again if they were outdated.
        """
        self._stale.difference_update(request_ids)

    def take(self) -> tuple[tuple[LoadPlan, ...], tuple[str, ...]]:
        """Loads to begin, and requests whose loads are to be given up; each is told once."""
        begun, given_up = tuple(self._begun), tuple(self._given_up)
        self._begun.clear()
        self._given_up.clear()
        return begun, given_up

    def __repr__(self) -> str:
        return f"<ParkedRequests {len(self._loading)} loading>"
