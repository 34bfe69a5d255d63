"""Queues of tenants, and which tenant is next. Pure: knows neither tasks nor time.

The tenant that has the least is next; among equals the one that was served the least while it was
here (start-time fair queueing), so that many requests of one do not stand before the first of
another; then the one whose oldest request came first. A change of one tenant moves that tenant
alone, so a step takes as long with many tenants as with few.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar, cast

from sortedcontainers import SortedList

from objectcache_runtime.shares.fair_shares import FairShares

QUEUES, WAITING_MIN = 4, 1024  # requests of all that may wait: so many queues, or so many
Rank = tuple[float, float, int, str]  # what a tenant has, what it had, its oldest request; its name
R = TypeVar("R", bound=Hashable)


def waiting_max(queue_max: int) -> int:
    """Requests of all tenants that may wait in one line, where one tenant's queue has so many."""
    return max(QUEUES * queue_max, WAITING_MIN)


class Ranks:
    """Tenants in the order of their ranks, which is that of the loop over them."""

    def __init__(self) -> None:
        self._ranks: dict[str, Rank] = {}
        self._sorted = SortedList()

    @property
    def first(self) -> Rank | None:
        """The lowest rank; None where no tenant has one."""
        return cast(Rank, self._sorted[0]) if self._sorted else None

    def put(self, tenant: str, rank: Rank | None) -> None:
        """Give the tenant this rank instead of its own, or none."""
        known = self._ranks.pop(tenant, None)
        if known is not None:
            self._sorted.remove(known)
        if rank is not None:
            self._ranks[tenant] = rank
            self._sorted.add(rank)

    def __contains__(self, tenant: str) -> bool:
        return tenant in self._ranks

    def __iter__(self) -> Iterator[str]:
        return (rank[-1] for rank in self._sorted)


class TenantQueues(Generic[R]):
    """A queue of each tenant that waits. Not safe to use from several threads.

    Whoever changes what a tenant has, or its queue, calls `place` for that tenant.
    """

    def __init__(self, queue_max: int) -> None:
        """`queue_max`: scheduler.queue_max, requests of one tenant."""
        self.ready = Ranks()  # the tenants that could be next
        self._queue_max = queue_max
        self._places = FairShares(waiting_max(queue_max))
        self._queues: dict[str, OrderedDict[R, int]] = {}  # requests, in their order, numbered
        self._count = 0
        self._turn = 0.0  # of the tenant that was served last
        self._turns: dict[str, float] = {}  # what each was served, over its weight, while here

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._places.taken

    @property
    def tenants(self) -> int:
        """How many of them have requests that wait."""
        return len(self._queues)

    def length(self, tenant: str) -> int:
        """Requests of this tenant that wait."""
        return self._places.held(tenant)

    def oldest(self, tenant: str) -> R:
        """The next request of a tenant that has one."""
        return next(iter(self._queues[tenant]))

    def is_full(self, tenant: str) -> bool:
        """Whether the tenant's own queue is."""
        return self.length(tenant) >= self._queue_max

    def has_place(self, tenant: str) -> bool:
        """Whether those of all tenants leave room for one more of this tenant's."""
        return self._places.may_take(tenant, 1)

    def add(self, tenant: str, request: R) -> None:
        """A request waits from now on, behind its tenant's others."""
        self._count += 1
        self._queues.setdefault(tenant, OrderedDict())[request] = self._count
        self._places.take(tenant, 1)
        self._turns.setdefault(tenant, self._turn)

    def remove(self, tenant: str, request: R) -> None:
        """It waits no longer."""
        queue = self._queues[tenant]
        del queue[request]
        if not queue:
            del self._queues[tenant]
        self._places.give_back(tenant, 1)

    def served(self, tenant: str, weight: float = 1.0) -> None:
        """A request of this tenant was."""
        turn = self._turns.get(tenant, self._turn)
        self._turn = max(self._turn, turn)
        self._turns[tenant] = turn + 1 / weight

    def place(self, tenant: str, has: float, *, is_ready: bool = True) -> None:
        """The tenant has so much, over its weight: it takes its place among those that could be
        next, if it is ready and a request of it waits. One that has and waits for nothing is
        forgotten.
        """
        is_waiting = tenant in self._queues
        self.ready.put(tenant, self.rank(tenant, has) if is_waiting and is_ready else None)
        if not is_waiting and not has:
            self._turns.pop(tenant, None)

    def rank(self, tenant: str, has: float) -> Rank:
        """The place of a tenant that has so much: of its oldest request, or of its next."""
        queue = self._queues.get(tenant)
        number = next(iter(queue.values())) if queue else self._count + 1
        return has, self._turns.get(tenant, self._turn), number, tenant

    def __repr__(self) -> str:
        return f"<TenantQueues {self.waiting} of {self.tenants} tenants wait>"
