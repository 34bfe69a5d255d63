"""Who among the tenants that wait is next. Pure: knows neither tasks nor time.

The tenant that holds the least is; among equals the one that was served the least while it was
here (start-time fair queueing), so that many requests of one do not stand before the first of
another; then the one whose oldest turn came first. Within a tenant it is first come, first served.
Where the wish of the one that is next does not fit, others that do pass it, PASSED_MAX times, so
that a large wish neither holds everybody up nor is starved. Wishes that are too small to hold it up
(`passes_freely`) do so without a bound.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.errors import Busy
from objectcache_storage_server.admission.delivery_turns import waiting_max as waiting_of_all_max

FULL_RETRY_AFTER_S = 1.0
TENANTS_REMEMBERED_MAX = 4096
PASSED_MAX = 64  # by how many the turn that is next may be passed

W = TypeVar("W")


class Scarce(ABC, Generic[W]):
    """What tenants wait for. Not safe to use from several threads."""

    name: str  # for whoever is told to come back

    @abstractmethod
    def take(self, tenant: str, wish: W) -> int | None:
        """What this tenant is given now, which `give_back` takes; None where nothing is."""

    @abstractmethod
    def give_back(self, tenant: str, taken: int) -> None:
        """Take it back, or a part of it where it can be divided."""

    @abstractmethod
    def held(self, tenant: str) -> float:
        """The part of the whole that this tenant holds."""

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

    def __init__(self, tenant: str, wish: W, settled: Callable[[], object], number: int) -> None:
        self.tenant = tenant
        self.wish = wish
        self.taken: int | None = None
        self.settled = settled
        self.number = number
        self.passed = 0  # while it was next


class FairLine(Generic[W]):
    """The turns that wait for one scarce thing."""

    def __init__(self, scarce: Scarce[W], waiting_max: int) -> None:
        """`waiting_max`: scheduler.queue_max, turns of one tenant."""
        self._scarce = scarce
        self._waiting_max = waiting_max
        self._places = FairShares(waiting_of_all_max(waiting_max))
        self._queues: dict[str, OrderedDict[Turn[W], None]] = {}
        self._count = 0
        self._round = 0  # when one was served last
        self._next_rounds: dict[str, int] = {}  # of tenants that are ahead of it
        self._first: Turn[W] | None = None  # once looked for, until ranks may have changed

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return self._places.taken

    @property
    def first(self) -> Turn[W] | None:
        """The turn that is next; None where nobody waits."""
        if self._first is None and self._queues:
            self._first = min(self._heads(), key=self._rank)
        return self._first

    def _heads(self) -> list[Turn[W]]:
        return [next(iter(queue)) for queue in self._queues.values()]

    def _rank(self, turn: Turn[W]) -> tuple[float, int, int]:
        return self._scarce.held(turn.tenant), self._round_of(turn.tenant), turn.number

    def _round_of(self, tenant: str) -> int:
        return max(self._round, self._next_rounds.get(tenant, 0))

    def ask(self, tenant: str, wish: W, settled: Callable[[], object]) -> Turn[W]:
        """A turn that was served, or one that waits. Raises `Busy` where too many wait."""
        self._count += 1
        turn = Turn(tenant, wish, settled, self._count)
        if tenant not in self._queues:
            self._try(turn)
        if turn.taken is None:
            self._check_places(tenant)
            self._places.take(tenant, 1)
            self._queue(turn)
        return turn

    def _queue(self, turn: Turn[W]) -> None:
        queue = self._queues.setdefault(turn.tenant, OrderedDict())
        queue[turn] = None
        if self._first is not None and len(queue) == 1:
            self._first = min(self._first, turn, key=self._rank)

    def advance(self) -> None:
        """Something came back, or somebody left: serve as many turns as can be, in their order."""
        self._first = None
        while (turn := self._served_next()) is not None:
            self._remove(turn)
            turn.settled()

    def _served_next(self) -> Turn[W] | None:
        """The turn that was served now, the first in their order that could be."""
        first = self.first
        if first is None or self._try(first):
            return first
        heads = sorted(self._heads(), key=self._rank)
        return next((turn for turn in heads[1:] if self._try(turn)), None)

    def _try(self, turn: Turn[W]) -> bool:
        """Serve it if it fits and may pass the turn that is next, should that come before it."""
        first = self.first
        if first is None or self._rank(first) >= self._rank(turn):
            return self._take(turn)
        if self._scarce.passes_freely(turn.tenant, turn.wish):
            return self._take(turn)
        if first.passed >= PASSED_MAX or not self._take(turn):
            return False
        first.passed += 1
        return True

    def leave(self, turn: Turn[W]) -> int:
        """The turn is wanted no more; returns what it took, to be given back."""
        if turn.taken is None:
            self._remove(turn)
        return turn.taken or 0

    def is_wanted_more(self, tenant: str) -> bool:
        """Whether a tenant that holds less than this one waits."""
        first = self.first
        return first is not None and self._scarce.held(first.tenant) < self._scarce.held(tenant)

    def is_held_from_others(self, tenant: str) -> bool:
        """Whether a tenant that holds less than this one waits, or a request of its own."""
        return tenant in self._queues or self.is_wanted_more(tenant)

    def _take(self, turn: Turn[W]) -> bool:
        turn.taken = self._scarce.take(turn.tenant, turn.wish)
        if turn.taken is None:
            return False
        self._first = None
        self._round = self._round_of(turn.tenant)
        self._next_rounds[turn.tenant] = self._round + 1
        if len(self._next_rounds) > TENANTS_REMEMBERED_MAX:
            ahead = {who: at for who, at in self._next_rounds.items() if at > self._round + 1}
            self._next_rounds = ahead
        return True

    def _remove(self, turn: Turn[W]) -> None:
        self._first = None
        queue = self._queues[turn.tenant]
        del queue[turn]
        if not queue:
            del self._queues[turn.tenant]
        self._places.give_back(turn.tenant, 1)

    def _check_places(self, tenant: str) -> None:
        waiting = self._places.held(tenant)
        if waiting >= self._waiting_max:
            what = f"(scheduler.queue_max is {self._waiting_max})"
        elif not self._places.may_take(tenant, 1):
            what = f"of {self.waiting} that wait in all"
        else:
            return
        raise Busy(
            f"{self._scarce.shortage(tenant)}, and {waiting} requests of this tenant wait for "
            f"{self._scarce.name} {what}",
            retry_after_s=FULL_RETRY_AFTER_S,
        )

    def __repr__(self) -> str:
        return f"<FairLine {self.waiting} of {len(self._queues)} tenants wait>"
