"""Ways to choose whose fragment goes next. A lane holds the flows that may be chosen by it.

A flow is in its lane from `add` to `discard`. It is not chosen while it is asleep (no room at its
client's side; `wake` ends it), parked (its own rate says later) or held (its tenant's cap does, or
the storage NIC that it goes to). Flows of one tenant to one NIC are held together, so that a slow
NIC holds up nobody else.

No call looks at all flows of a lane that has many.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.keyed_line import KeyedLine
from objectcache_storage_server.scheduling.lanes.nic_paces import Destination, Nic
from objectcache_storage_server.scheduling.lanes.round_robin import DeficitRoundRobin

MOVED_MAX = 16  # flows in one decision, from line to line; it must not take long


class HeldLine(KeyedLine[Flow[JobT]]):
    """Flows of one lane that are held for one destination; never empty."""

    def __init__(self, destination: Destination, nic: Nic | None) -> None:
        super().__init__()
        self.destination = destination
        self.nic = nic


class FlowLane(ABC, Generic[JobT]):
    """Flows of one kind."""

    is_pooled = True  # or they take fair turns: a NIC has a clock for each side

    def __init__(self) -> None:
        self.flows: dict[Flow[JobT], None] = {}
        self.tag = 0.0  # what it was sent, over what it is entitled to
        self._parked: KeyedLine[Flow[JobT]] = KeyedLine()
        self.held: dict[str, dict[str, HeldLine[JobT]]] = {}  # by tenant and NIC
        self._opening: KeyedLine[HeldLine[JobT]] = KeyedLine()  # by when one flow is let go

    def add(self, flow: Flow[JobT], now_s: float) -> None:
        """The flow may be chosen from now on."""
        self.flows[flow] = None
        if not flow.is_asleep:
            self._ready(flow, now_s)

    def discard(self, flow: Flow[JobT]) -> None:
        """The flow has ended, or belongs to another lane; no effect if it is not in this one."""
        if flow in self.flows:
            del self.flows[flow]
            self._parked.discard(flow)
            self._unready(flow)
            if self.held:
                self._discard_held(flow)

    def wake(self, flow: Flow[JobT], now_s: float) -> None:
        """The flow has room again."""
        if flow.is_asleep and flow in self.flows:
            flow.asleep_since_s = None
            self._ready(flow, now_s)

    def sleep(self, flow: Flow[JobT], now_s: float) -> None:
        """The flow, which was chosen, has nothing that can go."""
        flow.asleep_since_s = now_s
        self._unready(flow)
        self.let_go(flow.destination, -math.inf)

    def park(self, flow: Flow[JobT], until_s: float) -> None:
        """The flow, which was chosen, may not go before `until_s`."""
        self._unready(flow)
        self._parked.put(flow, until_s)
        self.let_go(flow.destination, -math.inf)

    def hold(self, flow: Flow[JobT], until_s: float) -> None:
        """What the flow, which was chosen, goes to may be sent nothing before `until_s`."""
        self._unready(flow)
        tenant, nic = flow.destination
        lines = self.held.setdefault(tenant, {})
        if (line := lines.get(nic)) is None:
            line = lines[nic] = HeldLine(flow.destination, flow.nic)
        line.put(flow, self._rank(flow))
        self._opening.put(line, until_s)

    def let_go(self, destination: Destination, at_s: float) -> None:
        """One of the flows that are held for this destination may be chosen from then on."""
        tenant, nic = destination
        if tenant in self.held and nic in self.held[tenant]:
            self._opening.put(self.held[tenant][nic], at_s)

    def let_go_tenant(self, tenant: str, at_s: float) -> None:
        """The same of all that is held for this tenant, which may be sent nothing before."""
        for line in self.held[tenant].values():
            nic = line.nic
            opens_at_s = at_s if nic is None else max(at_s, nic.next_at_s(pooled=self.is_pooled))
            self._opening.put(line, opens_at_s)

    def let_go_anew(self, next_at_s: Callable[[str], float]) -> None:
        """The tenants' caps are others: `next_at_s` tells from when a tenant may send."""
        for tenant in self.held:
            self.let_go_tenant(tenant, next_at_s(tenant))

    def held_count(self, destination: Destination) -> int:
        """Flows that are held for this destination."""
        tenant, nic = destination
        return len(self.held.get(tenant, {}).get(nic, ()))

    def _discard_held(self, flow: Flow[JobT]) -> None:
        tenant, nic = flow.destination
        if (line := self.held.get(tenant, {}).get(nic)) is None:
            return
        line.discard(flow)
        if line:
            self._opening.put(line, -math.inf)  # it may be the one that was let go
        else:
            self._forget(line)

    def _forget(self, line: HeldLine[JobT]) -> None:
        tenant, nic = line.destination
        del self.held[tenant][nic]
        if not self.held[tenant]:
            del self.held[tenant]
        self._opening.discard(line)

    def choose(self, now_s: float, *, again: bool = False) -> Flow[JobT] | None:
        """Whose turn it is: the caller sends a fragment of it and calls `sent`, or calls `sleep`,
        `park` or `hold`. `again` is in the same decision, after one of these three.
        """
        if not again:
            self._prepare(now_s)
        return self._first(now_s)

    def _prepare(self, now_s: float) -> None:
        """What is done once in a decision: whose time has come may be chosen."""
        for _ in range(MOVED_MAX):
            if (parked := self._parked.first()) is None or parked[0] > now_s:
                break
            self._parked.discard(parked[1])
            self._ready(parked[1], now_s)
        for _ in range(MOVED_MAX):
            if (opening := self._opening.first()) is None or opening[0] > now_s:
                break
            self._let_one_go(opening[1], now_s)

    def _let_one_go(self, line: HeldLine[JobT], now_s: float) -> None:
        self._opening.discard(line)
        if (first := line.first()) is not None:
            line.discard(first[1])
            self._ready(first[1], now_s)
        if not line:
            self._forget(line)

    @property
    def wake_at_s(self) -> float:
        """When a flow that is parked or held may go; infinity where none is."""
        parked, opening = self._parked.first(), self._opening.first()
        return min(parked[0] if parked else math.inf, opening[0] if opening else math.inf)

    def _rank(self, flow: Flow[JobT]) -> float:
        """Which of a destination's held flows is let go first: the least; among equals the longest
        held.
        """
        return 0.0

    @abstractmethod
    def sent(self, flow: Flow[JobT], length_bytes: int, now_s: float) -> None:
        """A fragment of the chosen flow goes; its own account was charged already."""

    @abstractmethod
    def _ready(self, flow: Flow[JobT], now_s: float) -> None: ...

    @abstractmethod
    def _unready(self, flow: Flow[JobT]) -> None: ...

    @abstractmethod
    def _first(self, now_s: float) -> Flow[JobT] | None: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self.flows)} flows>"


class FairLane(FlowLane[JobT]):
    """Weighted deficit round robin; a tenant's weight is shared by its flows in the lane."""

    is_pooled = False

    def __init__(self) -> None:
        super().__init__()
        self._ring: DeficitRoundRobin[Flow[JobT]] = DeficitRoundRobin()
        self._counts: dict[str, int] = {}

    def add(self, flow: Flow[JobT], now_s: float) -> None:
        self._count(flow, 1)
        super().add(flow, now_s)

    def discard(self, flow: Flow[JobT]) -> None:
        if flow in self.flows:
            self._count(flow, -1)
        super().discard(flow)

    def _count(self, flow: Flow[JobT], change: int) -> None:
        tenant = flow.demand.tenant
        self._counts[tenant] = self._counts.get(tenant, 0) + change
        if self._counts[tenant] == 0:
            del self._counts[tenant]

    def _weight(self, flow: Flow[JobT]) -> float:
        return flow.demand.weight / self._counts.get(flow.demand.tenant, 1)

    def _ready(self, flow: Flow[JobT], now_s: float) -> None:
        self._ring.add(flow, self._weight(flow))

    def _unready(self, flow: Flow[JobT]) -> None:
        self._ring.discard(flow)

    def _first(self, now_s: float) -> Flow[JobT] | None:
        return self._ring.turn()

    def sent(self, flow: Flow[JobT], length_bytes: int, now_s: float) -> None:
        self._ring.add(flow, self._weight(flow))  # others of its tenant may have come or gone
        self._ring.charge(flow, length_bytes)
