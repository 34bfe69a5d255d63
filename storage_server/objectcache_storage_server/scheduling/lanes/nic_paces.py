"""The storage NICs that deliveries go to: how much each may be sent, and when.

A NIC is known by the tenant whose deliveries named it and by its name, so nobody slows another
tenant's NIC by using its name. It carries what the newest delivery that said a rate for it said;
one of which nobody said a rate is counted and not paced.

Deliveries of the pool and those that take fair turns share a NIC by their numbers, each side at a
clock of its own: a lane that has sent little elsewhere must not have all of a slow NIC.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from objectcache_storage_server.scheduling.lanes.pace_link import Pace, RateMeter

Destination = tuple[str, str]  # a tenant, and the name of a NIC; empty where none is named

NICS_MAX = 1024  # that are known without deliveries; those with some are bounded with these
NICS_OF_TENANT_MAX = 256  # with deliveries; those to more are paced to none
NIC_KEPT_S = 600.0  # after its last delivery, for whoever looks at what went to it


class Nic:
    """One NIC: its rate, its clocks, and what was sent to it. Rate infinity is not known."""

    __slots__ = ("_clocks", "_counts", "destination", "idle_since_s", "meter", "rate", "sent_bytes")

    def __init__(self, destination: Destination, catch_up_s: float, now_s: float) -> None:
        self.destination = destination
        self.rate = math.inf  # bytes per second
        self.sent_bytes = 0
        self.meter = RateMeter()
        self.idle_since_s = now_s
        self._counts = [0, 0]  # deliveries that take fair turns, and of the pool
        self._clocks = [Pace(math.inf, catch_up_s, now_s) for _ in self._counts]

    @property
    def deliveries(self) -> int:
        """That go to it now."""
        return sum(self._counts)

    @property
    def pool_bytes_per_s(self) -> float:
        """Of its rate, what deliveries of the pool have together."""
        return self._side_rate(1)

    def _side_rate(self, side: int) -> float:
        deliveries = self.deliveries
        return self.rate * self._counts[side] / deliveries if self._counts[side] else self.rate

    def change(
        self, now_s: float, *, rate: float | None = None, pool: int = 0, fair: int = 0
    ) -> None:
        """Another rate, and so many deliveries more on either side."""
        if rate is not None:
            self.rate = rate
        self._counts[0] += fair
        self._counts[1] += pool
        assert min(self._counts) >= 0
        for side, clock in enumerate(self._clocks):
            side_rate = self._side_rate(side)
            if side_rate != clock.rate_bytes_per_s:
                has_both = max(side_rate, clock.rate_bytes_per_s) < math.inf
                (clock.turn if has_both else clock.change)(side_rate, now_s)

    def next_at_s(self, *, pooled: bool) -> float:
        """When the next piece of this side may go; in the past it may go now."""
        return self._clocks[pooled].next_at_s

    def charge(self, length_bytes: int, now_s: float, *, pooled: bool) -> None:
        """A piece of this side goes now."""
        self._clocks[pooled].charge(length_bytes, now_s)
        self.sent_bytes += length_bytes
        self.meter.add(length_bytes, now_s)

    def __repr__(self) -> str:
        return f"<Nic {self.destination}, {self.rate:.3g} B/s, {self.deliveries} deliveries>"


class NicPaces:
    """All that are known."""

    def __init__(self, catch_up_s: float) -> None:
        self._catch_up_s = catch_up_s
        self._nics: dict[Destination, Nic] = {}
        self._idle: OrderedDict[Destination, Nic] = OrderedDict()  # the longest first
        self._used: dict[str, int] = {}  # NICs with deliveries, by tenant
        self.beyond_count = 0  # deliveries that named one more than their tenant may use

    def admits(self, destination: Destination) -> bool:
        """Whether a delivery to it may be paced: its tenant uses fewer NICs than it may, or this
        one already. One that may not is counted.
        """
        nic = self._nics.get(destination)
        if nic is not None and nic.deliveries:
            return True
        if self._used.get(destination[0], 0) < NICS_OF_TENANT_MAX:
            return True
        self.beyond_count += 1
        return False

    def enter(
        self, destination: Destination, rate: float | None, now_s: float, *, pooled: bool
    ) -> Nic:
        """A delivery goes there from now on; `rate`, bytes per second, is what it says of it."""
        nic = self._nics.get(destination)
        if nic is None:
            nic = self._nics[destination] = Nic(destination, self._catch_up_s, now_s)
        self._idle.pop(destination, None)
        if not nic.deliveries:
            self._used[destination[0]] = self._used.get(destination[0], 0) + 1
        nic.change(now_s, rate=rate, pool=int(pooled), fair=int(not pooled))
        self._forget(now_s)
        return nic

    def leave(self, nic: Nic, now_s: float, *, pooled: bool) -> None:
        """A delivery, which was counted on this side, goes there no longer."""
        nic.change(now_s, pool=-int(pooled), fair=-int(not pooled))
        if not nic.deliveries:
            nic.idle_since_s = now_s
            tenant = nic.destination[0]
            self._used[tenant] -= 1
            if not self._used[tenant]:
                del self._used[tenant]
            self._idle[nic.destination] = nic

    def _forget(self, now_s: float) -> None:
        """Those that were idle for long, and of too many the longest idle."""
        while self._idle:
            destination, nic = next(iter(self._idle.items()))
            if len(self._idle) <= NICS_MAX and now_s - nic.idle_since_s < NIC_KEPT_S:
                return
            del self._idle[destination], self._nics[destination]

    def known(self) -> list[Nic]:
        """All of them, those first that have been known for longest."""
        return list(self._nics.values())

    def __repr__(self) -> str:
        return f"<NicPaces of {len(self._nics)}, {len(self._idle)} idle>"
