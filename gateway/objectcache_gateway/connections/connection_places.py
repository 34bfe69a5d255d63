"""Which connection ends where there are too many. Pure.

A connection is a stranger's until a good signature was seen on it; then it is its tenant's.
Strangers' connections end before anybody else's, the oldest first, whatever they do: a head that
half arrived, a refusal that is not read and silence are alike. A part of all places is never a
tenant's, so that there always is a stranger to end, and a newcomer is always let in; while
strangers have less than a larger part, idle connections of whoever has most end before theirs.
Among tenants the places are shared max-min, and what one does not use is lent to the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

STRANGERS_PART = 16  # one place in so many is no tenant's
IDLE_GIVES_WAY_PART = 4  # idle connections end for strangers that have less than one in so many

C = TypeVar("C", bound=Hashable)


@dataclass(slots=True)
class _Held(Generic[C]):
    """The connections of one tenant; those that are longest in their state come first."""

    idle: dict[C, None] = field(default_factory=dict[C, None])
    busy: dict[C, None] = field(default_factory=dict[C, None])

    def __len__(self) -> int:
        return len(self.idle) + len(self.busy)


class ConnectionPlaces(Generic[C]):
    """The open connections of one process. Every answer names whom the caller has to end; what was
    named is counted no more.
    """

    def __init__(self, places_max: int) -> None:
        """At least 2: one is for whoever has yet to show a signature."""
        self._places_max = max(2, places_max)
        self._known_max = self._places_max - max(1, self._places_max // STRANGERS_PART)
        self._strangers: dict[C, float] = {}  # when they came; the oldest first
        self._tenants: dict[str, _Held[C]] = {}
        self._tenant_of: dict[C, str] = {}

    def __len__(self) -> int:
        return len(self._strangers) + len(self._tenant_of)

    @property
    def strangers(self) -> int:
        """Connections on which nobody has shown a good signature."""
        return len(self._strangers)

    def open(self, connection: C, now_s: float) -> C | None:
        """Count a newcomer in; the one that goes for it, if one has to: a tenant's idle one
        while strangers have few places, else the oldest stranger.
        """
        ended: C | None = None
        if len(self) >= self._places_max:
            if self.strangers < self._places_max // IDLE_GIVES_WAY_PART:
                ended = self._end_idle()
            if ended is None:
                ended = self.oldest_stranger()
        self._strangers[connection] = now_s
        return ended

    def _end_idle(self) -> C | None:
        """End what is idle longest of whoever holds most among those with any."""
        idle = [held for held in self._tenants.values() if held.idle]
        if not idle:
            return None
        ended = next(iter(max(idle, key=len).idle))
        self.lost(ended)
        return ended

    def oldest_stranger(self) -> C | None:
        """The stranger who came first, counted no more; None where there are none."""
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            del self._strangers[oldest]
        return oldest

    def overdue(self, came_before_s: float) -> Iterator[C]:
        """Where more than half of the places are taken, the strangers who came before that time and
        have shown no signature since.
        """
        while 2 * len(self) > self._places_max and self._strangers:
            oldest, came_s = next(iter(self._strangers.items()))
            if came_s >= came_before_s:
                return
            del self._strangers[oldest]
            yield oldest

    def begin(self, connection: C, tenant: str) -> tuple[bool, C | None]:
        """A request with a good signature begins. Whether its connection is the tenant's now, and
        the one that goes for it, if one has to. It is not where the tenant holds as many as any
        other and all of its own have requests under way; a connection that was ended is nobody's.
        """
        before = self._tenant_of.get(connection)
        if before is None and connection not in self._strangers:
            return False, None
        if before == tenant:
            held = self._tenants[tenant]
            held.idle.pop(connection, None)
            held.busy[connection] = None
            return True, None
        came_s = self._strangers.get(connection, 0.0)
        self.lost(connection)
        self._tenants.setdefault(tenant, _Held()).busy[connection] = None
        self._tenant_of[connection] = tenant
        if len(self._tenant_of) <= self._known_max:
            return True, None
        ended = self._end_one_for(tenant)
        if ended is None:
            self.lost(connection)
            self._strangers[connection] = came_s
        return ended is not None, ended

    def end(self, connection: C, now_s: float, *, stays_known: bool = True) -> None:
        """The connection's request has ended. One that does not stay known, because no signature
        was needed, is a stranger's again.
        """
        tenant = self._tenant_of.get(connection)
        if tenant is None:
            return
        if stays_known:
            held = self._tenants[tenant]
            held.busy.pop(connection, None)
            held.idle[connection] = None
        else:
            self.lost(connection)
            self._strangers[connection] = now_s

    def lost(self, connection: C) -> None:
        """The connection has ended. Repeating has no effect."""
        self._strangers.pop(connection, None)
        tenant = self._tenant_of.pop(connection, None)
        if tenant is None:
            return
        held = self._tenants[tenant]
        held.idle.pop(connection, None)
        held.busy.pop(connection, None)
        if not held:
            del self._tenants[tenant]

    def _end_one_for(self, tenant: str) -> C | None:
        """End one of whoever holds most: an idle one of a tenant with no fewer than this one, or
        else any of a tenant with more.
        """
        count = len(self._tenants[tenant])
        idle = [held for held in self._tenants.values() if held.idle and len(held) >= count]
        held = max(idle or self._tenants.values(), key=len)
        if not idle and len(held) <= count:
            return None
        ended = next(iter(held.idle or held.busy))
        self.lost(ended)
        return ended

    def __repr__(self) -> str:
        return (
            f"<ConnectionPlaces {len(self)}/{self._places_max}, {self.strangers} strangers, "
            f"{len(self._tenants)} tenants>"
        )
