"""Who may have landing memory, and who waits for it: askers in turn, each in its own order.

Pure: the shell waits for `LandingGrant.on_granted`. Strictly in turn, so that small deliveries
that fit in what is left do not keep a large one out. Deliveries that are wanted at a rate, which
may take minutes, together have half of the memory at most, or one of them does. With the rings,
which have theirs until a prefix larger than the memory has come, they have three quarters. Others
have the rest, and pass those that wait for such a share. Memory that is held for those who may
claim what lies there counts as free: it is taken, the oldest first, before anybody waits.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from objectcache_schemas.errors import InvalidRequest

# At a time: half of the targets that a storage server lets a session register.
DELIVERIES_MAX = 128


def ring_share(capacity_bytes: int) -> int:
    """What all rings have, together with what comes at a rate."""
    return capacity_bytes // 4 * 3


class LandingLine(NamedTuple):
    """Who wait for each other, in their order: one asker's gets of one kind."""

    asker: Hashable
    is_rated: bool
    is_ring: bool


class LandingState(enum.Enum):
    """What became of what was asked for."""

    WAITING = "waiting"
    GRANTED = "granted"
    HELD = "held"  # used by nobody, and anybody's who needs it
    OVER = "over"


class LandingGrant:
    """Landing bytes for one delivery. `on_granted` is called once, where it had to wait."""

    def __init__(
        self, length_bytes: int, on_granted: Callable[[], None], line: LandingLine
    ) -> None:
        self.length_bytes = length_bytes
        self.line = line
        self.on_granted = on_granted
        self.on_taken = on_granted  # while it is held
        self.state = LandingState.WAITING

    def __repr__(self) -> str:
        return f"<LandingGrant {self.length_bytes} bytes, {self.state.value}>"


class LandingGrants:
    """`capacity_bytes` of memory, for `deliveries_max` at a time. Used in the event loop."""

    def __init__(self, capacity_bytes: int, deliveries_max: int = DELIVERIES_MAX) -> None:
        self.capacity_bytes = capacity_bytes
        self._deliveries_max = deliveries_max
        self._deliveries = 0
        self.granted_bytes = 0
        self.held_bytes = 0
        self._held: dict[LandingGrant, None] = {}  # the oldest first
        self.waiting_bytes = 0
        self._lines: dict[LandingLine, deque[LandingGrant]] = {}  # whose turn it is comes first
        self._long: set[LandingGrant] = set()  # granted: what comes at a rate, and rings

    @property
    def free_bytes(self) -> int:
        """What is not granted; what is held is."""
        return self.capacity_bytes - self.granted_bytes

    def ask(
        self,
        length_bytes: int,
        on_granted: Callable[[], None],
        asker: Hashable = None,
        *,
        is_rated: bool = False,
        is_ring: bool = False,
    ) -> LandingGrant:
        """Ask for memory; the grant tells whether there is some at once. One is_rated comes no
        faster than a rate, one is_ring is smaller than what comes through it. Raises
        `InvalidRequest` for more than there is.
        """
        if length_bytes > self.capacity_bytes:
            raise InvalidRequest(
                f"the payload needs {length_bytes} bytes of landing memory, relay.landing_bytes is "
                f"{self.capacity_bytes}; have it delivered directly, or fewer chunks of it"
            )
        grant = LandingGrant(length_bytes, on_granted, LandingLine(asker, is_rated, is_ring))
        if self._next() is None and self._may(grant) and self._fits(grant):
            self._give(grant)
        else:
            self._lines.setdefault(grant.line, deque()).append(grant)
            self.waiting_bytes += length_bytes
        return grant

    def end(self, grant: LandingGrant) -> None:
        """Give it back, or wait for it no more. A second call has no effect."""
        if grant.state is LandingState.GRANTED:
            self._take_back(grant)
        elif grant.state is LandingState.HELD:
            self._forget_held(grant)
        elif grant.state is LandingState.WAITING:
            self._forget_waiting(grant)
        else:
            return
        grant.state = LandingState.OVER
        self._give_on()

    def hold(self, grant: LandingGrant, on_taken: Callable[[], None]) -> None:
        """Nobody uses the granted memory, and what lies there may be wanted again. `on_taken` is
        called where somebody else needs the memory, at once perhaps; it is over then.
        """
        assert grant.state is LandingState.GRANTED
        self._take_back(grant)
        grant.state, grant.on_taken = LandingState.HELD, on_taken
        self._held[grant] = None
        self.held_bytes += grant.length_bytes
        self._give_on()

    def use_again(self, grant: LandingGrant) -> None:
        """Held memory is used again."""
        assert grant.state is LandingState.HELD
        self._forget_held(grant)
        self._give(grant)

    def _take_back(self, grant: LandingGrant) -> None:
        self.granted_bytes -= grant.length_bytes
        self._deliveries -= 1
        self._long.discard(grant)

    def _forget_waiting(self, grant: LandingGrant) -> None:
        line = self._lines[grant.line]
        line.remove(grant)
        if not line:
            del self._lines[grant.line]
        self.waiting_bytes -= grant.length_bytes

    def _forget_held(self, grant: LandingGrant) -> None:
        del self._held[grant]
        self.held_bytes -= grant.length_bytes

    def _give_on(self) -> None:
        while (grant := self._next()) is not None and self._fits(grant):
            self._forget_waiting(grant)
            if grant.line in self._lines:  # the others' turn
                self._lines[grant.line] = self._lines.pop(grant.line)
            self._give(grant)
            grant.on_granted()

    def _next(self) -> LandingGrant | None:
        """Whose turn it is, of those who may have memory once it is free."""
        return next((line[0] for line in self._lines.values() if self._may(line[0])), None)

    def _may(self, grant: LandingGrant) -> bool:
        """Whether it is within its share, where it is of those that have one. The only ring
        waits for nothing that comes at a rate.
        """
        line = grant.line
        if not (line.is_rated or line.is_ring):
            return True
        rated = [one for one in self._long if one.line.is_rated]
        if not (self._long if line.is_rated else self._long.difference(rated)):
            return True
        if line.is_rated and not self._may_at_a_rate(grant, rated):
            return False
        long_bytes = sum(one.length_bytes for one in self._long) + grant.length_bytes
        return long_bytes <= ring_share(self.capacity_bytes)

    def _may_at_a_rate(self, grant: LandingGrant, rated: list[LandingGrant]) -> bool:
        rated_bytes = sum(one.length_bytes for one in rated) + grant.length_bytes
        is_within = rated_bytes <= self.capacity_bytes // 2
        return not rated or (is_within and len(rated) < self._deliveries_max // 2)

    def _fits(self, grant: LandingGrant) -> bool:
        return grant.length_bytes <= self.free_bytes and self._deliveries < self._deliveries_max

    def _give(self, grant: LandingGrant) -> None:
        self._deliveries += 1
        grant.state = LandingState.GRANTED
        self.granted_bytes += grant.length_bytes
        if grant.line.is_rated or grant.line.is_ring:
            self._long.add(grant)
        while (
            self.held_bytes > self.free_bytes
            or self._deliveries + len(self._held) > self._deliveries_max
        ):
            taken = next(iter(self._held))
            self._forget_held(taken)
            taken.state = LandingState.OVER
            taken.on_taken()

    def __repr__(self) -> str:
        return (
            f"<LandingGrants {self.granted_bytes}/{self.capacity_bytes} bytes, "
            f"{len(self._held)} held, {sum(map(len, self._lines.values()))} wait>"
        )
