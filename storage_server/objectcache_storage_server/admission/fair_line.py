"""Tenants that wait for one scarce thing, and who is served. Pure: knows neither tasks nor time.

Who is next says `tenant_queues`; within a tenant it is first come, first served. Where the wish of
the one that is next does not fit, others that do pass it, PASSED_MAX times, so that a large wish
neither holds everybody up nor is starved. Wishes that are too small to hold it up (`passes_freely`)
do so without a bound. The TRIED_MAX tenants that come first are tried, and so many of those that
pass freely: a step is no longer however many wait for more than there is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain, islice
from typing import Generic, TypeVar

from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.errors import Busy
from objectcache_storage_server.admission.tenant_queues import Rank, Ranks, TenantQueues

FULL_RETRY_AFTER_S = 1.0
PASSED_MAX = 64  # by how many the turn that is next may be passed
TRIED_MAX = 64  # tenants at a step

W = TypeVar("W")


class Scarce(ABC, Generic[W]):
    """What tenants wait for. Not safe to use from several threads."""

    name: str  # for whoever is told to come back

    @property
    @abstractmethod
    def is_exhausted(self) -> bool:
        """Whether there is nothing left for anybody."""

    @abstractmethod
    def take(self, tenant: str, wish: W) -> int | None:
        """What this tenant is given now, which `give_back` takes; None where nothing is."""

    @abstractmethod
    def give_back(self, tenant: str, taken: int) -> None:
        """Take it back, or a part of it where it can be divided."""

    @abstractmethod
    def held(self, tenant: str) -> float:
        """The part of the whole that this tenant holds; only what it takes and gives back changes
        it.
        """

    def passes_freely(self, tenant: str, wish: W) -> bool:
        """Whether such wishes, however many, leave room for what any other turn waits for."""
        return False

    @abstractmethod
    def shortage(self, tenant: str) -> str:
        """How much is taken of what limit, and by this tenant, for whoever is refused."""


class Counted(Scarce[int]):
    """Things that are alike; a wish is for so many of them."""

    def __init__(self, name: str, setting: str, total: int) -> None:
        """`setting` says what the bound is."""
        self.name = name
        self._setting = setting
        self._shares = FairShares(total)

    @property
    def taken(self) -> int:
        """How many are held."""
        return self._shares.taken

    @property
    def is_exhausted(self) -> bool:
        return self._shares.free <= 0

    def take(self, tenant: str, wish: int) -> int | None:
        if not self._shares.may_take(tenant, wish):
            return None
        self._shares.take(tenant, wish)
        return wish

    def give_back(self, tenant: str, taken: int) -> None:
        self._shares.give_back(tenant, taken)

    def held(self, tenant: str) -> float:
        return self._shares.held(tenant) / self._shares.total

    def shortage(self, tenant: str) -> str:
        shares = self._shares
        return (
            f"{shares.taken} {self.name} are taken, {shares.held(tenant)} of them by {tenant!r}; "
            f"{self._setting} is {shares.total}"
        )


class Turn(Generic[W]):
    """One request's wish; `taken` is None for as long as it waits.

    `settled` is called once, by `FairLine.advance`, when a turn that waited is served.
    """

    def __init__(self, tenant: str, wish: W, settled: Callable[[], object]) -> None:
        self.tenant = tenant
        self.wish = wish
        self.taken: int | None = None
        self.settled = settled
        self.passed = 0  # while it was next


class FairLine(Generic[W]):
    """The turns that wait for one scarce thing, which is taken and given back here alone."""

    def __init__(self, scarce: Scarce[W], queue_max: int) -> None:
        """`queue_max`: scheduler.queue_max, turns of one tenant."""
        self._scarce = scarce
        self._queue_max = queue_max
        self._queues: TenantQueues[Turn[W]] = TenantQueues(queue_max)
        self._passing = Ranks()  # tenants whose next turn passes freely
        self._is_returning = False  # something is on its way back

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return self._queues.waiting

    @property
    def first(self) -> Turn[W] | None:
        """The turn that is next; None where nobody waits."""
        first = self._queues.ready.first
        return None if first is None else self._queues.oldest(first[-1])

    def ask(self, tenant: str, wish: W, settled: Callable[[], object]) -> Turn[W]:
        """A turn that was served, or one that waits. Raises `Busy` where too many wait."""
        turn = Turn(tenant, wish, settled)
        if not self._queues.length(tenant) and not self._scarce.is_exhausted:
            self._try(turn, self._queues.rank(tenant, self._scarce.held(tenant)))
        if turn.taken is None:
            self._check_places(tenant)
            self._queues.add(tenant, turn)
        else:
            self._queues.served(tenant)
        self._place(tenant)
        return turn

    def give_back(self, tenant: str, taken: int) -> None:
        """Something comes back; those who wait have theirs."""
        self._is_returning = True
        try:
            self._scarce.give_back(tenant, taken)
        finally:
            self._is_returning = False
        self._place(tenant)
        self.advance()

    def advance(self) -> None:
        """There is more than there was, or somebody left: serve as many turns as can be, in their
        order. Without effect where `give_back`, which does so itself, is under way.
        """
        if self._is_returning:
            return
        while (turn := self._served_next()) is not None:
            self._queues.remove(turn.tenant, turn)
            self._queues.served(turn.tenant)
            self._place(turn.tenant)
            turn.settled()

    def _served_next(self) -> Turn[W] | None:
        """The turn that was served now, the first in their order that could be."""
        if self._scarce.is_exhausted:
            return None
        lists = (self._queues.ready, self._passing)
        tenants = chain.from_iterable(islice(ranks, TRIED_MAX) for ranks in lists)
        turns = map(self._queues.oldest, tenants)
        return next((turn for turn in turns if self._try(turn)), None)

    def _try(self, turn: Turn[W], rank: Rank | None = None) -> bool:
        """Serve it if it fits and may pass the turn that is next, should that come before it. One
        that does not wait yet has this rank.
        """
        first, first_rank = self.first, self._queues.ready.first
        comes_first = first is turn or (rank is not None and (first_rank or rank) >= rank)
        if first is None or comes_first or self._scarce.passes_freely(turn.tenant, turn.wish):
            return self._take(turn)
        if first.passed >= PASSED_MAX or not self._take(turn):
            return False
        first.passed += 1
        return True

    def _take(self, turn: Turn[W]) -> bool:
        turn.taken = self._scarce.take(turn.tenant, turn.wish)
        return turn.taken is not None

    def leave(self, turn: Turn[W]) -> int:
        """The turn is wanted no more; returns what it took, to be given back."""
        if turn.taken is None:
            self._queues.remove(turn.tenant, turn)
            self._place(turn.tenant)
        return turn.taken or 0

    def is_wanted_more(self, tenant: str) -> bool:
        """Whether a tenant that holds less than this one waits."""
        first = self._queues.ready.first
        return first is not None and first[0] < self._scarce.held(tenant)

    def is_held_from_others(self, tenant: str) -> bool:
        """Whether a tenant that holds less than this one waits, or a request of its own."""
        return tenant in self._queues.ready or self.is_wanted_more(tenant)

    def _place(self, tenant: str) -> None:
        """After any change of a tenant: its place in the line, and among those that pass freely."""
        held = self._scarce.held(tenant)
        self._queues.place(tenant, held)
        passes = tenant in self._queues.ready and self._scarce.passes_freely(
            tenant, self._queues.oldest(tenant).wish
        )
        self._passing.put(tenant, self._queues.rank(tenant, held) if passes else None)

    def _check_places(self, tenant: str) -> None:
        if self._queues.is_full(tenant):
            what = f"(scheduler.queue_max is {self._queue_max})"
        elif not self._queues.has_place(tenant):
            what = f"of {self.waiting} that wait in all"
        else:
            return
        waiting = self._queues.length(tenant)
        raise Busy(
            f"{self._scarce.shortage(tenant)}, and {waiting} requests of this tenant wait for "
            f"{self._scarce.name} {what}",
            retry_after_s=FULL_RETRY_AFTER_S,
        )

    def __repr__(self) -> str:
        return f"<FairLine {self.waiting} of {self._queues.tenants} tenants wait>"
