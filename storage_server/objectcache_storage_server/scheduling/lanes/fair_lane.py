"""Ways to choose whose fragment goes next. A lane holds the flows that may be chosen by it.

A flow is in its lane from `add` to `discard`. It is not chosen while it is asleep (no room at its
client's side; `wake` ends it), parked (its own rate says later) or held (its tenant's cap does).

No call looks at all flows of a lane that has many.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic

from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.keyed_line import KeyedLine
from objectcache_storage_server.scheduling.lanes.round_robin import DeficitRoundRobin

MOVED_MAX = 16  # flows in one decision, from line to line; it must not take long


class FlowLane(ABC, Generic[JobT]):
    """Flows of one kind."""

    def __init__(self) -> None:
        self.flows: dict[Flow[JobT], None] = {}
        self.tag = 0.0  # what it was sent, over what it is entitled to
        self._parked: KeyedLine[Flow[JobT]] = KeyedLine()
        self._held: dict[str, KeyedLine[Flow[JobT]]] = {}  # by tenant
        self._tenants: KeyedLine[str] = KeyedLine()  # of those, by the time when one flow is let go

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
        self.let_go(flow.demand.tenant, -math.inf)

    def park(self, flow: Flow[JobT], until_s: float) -> None:
        """The flow, which was chosen, may not go before `until_s`."""
        self._unready(flow)
        self._parked.put(flow, until_s)
        self.let_go(flow.demand.tenant, -math.inf)

    def hold(self, flow: Flow[JobT], until_s: float) -> None:
        """The flow's tenant, whose flow was chosen, may send nothing before `until_s`."""
        self._unready(flow)
        tenant = flow.demand.tenant
        self._held.setdefault(tenant, KeyedLine()).put(flow, self._rank(flow))
        self.let_go(tenant, until_s)

    def let_go(self, tenant: str, at_s: float) -> None:
        """One of the flows that are held for this tenant may be chosen from then on."""
        if tenant in self._held:
            self._tenants.put(tenant, at_s)

    def let_go_anew(self, next_at_s: Callable[[str], float]) -> None:
        """The tenants' caps are others: `next_at_s` tells from when a tenant may send."""
        for tenant in self._held:
            self.let_go(tenant, next_at_s(tenant))

    def _discard_held(self, flow: Flow[JobT]) -> None:
        tenant = flow.demand.tenant
        if (held := self._held.get(tenant)) is None:
            return
        held.discard(flow)
        if held:
            self.let_go(tenant, -math.inf)  # it may be the one that was let go
        else:
            self._forget_tenant(tenant)

    def _forget_tenant(self, tenant: str) -> None:
        del self._held[tenant]
        self._tenants.discard(tenant)

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
            if (tenant := self._tenants.first()) is None or tenant[0] > now_s:
                break
            self._let_one_go(tenant[1], now_s)

    def _let_one_go(self, tenant: str, now_s: float) -> None:
        self._tenants.discard(tenant)
        held = self._held[tenant]
        if (first := held.first()) is not None:
            held.discard(first[1])
            self._ready(first[1], now_s)
        if not held:
            self._forget_tenant(tenant)

    @property
    def wake_at_s(self) -> float:
        """When a flow that is parked or held may go; infinity where none is."""
        parked, tenant = self._parked.first(), self._tenants.first()
        return min(parked[0] if parked else math.inf, tenant[0] if tenant else math.inf)

    def _rank(self, flow: Flow[JobT]) -> float:
        """Which of a tenant's held flows is let go first: the least; among equals the longest
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
