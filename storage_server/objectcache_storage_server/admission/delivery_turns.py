"""Who may begin a delivery now, who waits for a turn, and who is told to come back.

A delivery runs while its tenant has fewer than it may have at once, and fewer than its share of
`deliveries_max`, which leaves room to whoever comes next (`fair_shares`). Past that a request waits
in its tenant's queue, first come, first served. Whenever a delivery ends the next one of some
tenant begins: of the tenant with the fewest deliveries for its weight, and among equals of the one
that has begun the fewest for its weight while it was here. So a tenant's queue holds up that tenant
alone. No request waits that could run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from sortedcontainers import SortedList

from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.errors import Busy
from objectcache_schemas.operators.schedule import TenantShare

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 0.1, 30.0
DURATION_UNKNOWN_S = 1.0  # of a delivery, before any has ended
DURATION_WEIGHT = 0.2  # of the latest delivery in a tenant's average: it remembers about ten
IDLE_TENANTS_MAX = 4096  # whose average is remembered
QUEUES, WAITING_MIN = 4, 1024  # requests of all that may wait: so many queues, or so many
_EVERYBODY = TenantShare()


def waiting_max(queue_max: int) -> int:
    """Requests of all tenants that may wait in one line, where one tenant's queue has so many."""
    return max(QUEUES * queue_max, WAITING_MIN)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """The bounds. What a tenant's share says goes before `tenant_deliveries_max`."""

    deliveries_max: int
    tenant_deliveries_max: int
    queue_max: int
    queue_timeout_s: float

    @property
    def waiting_max(self) -> int:
        """Requests of all tenants that may wait."""
        return waiting_max(self.queue_max)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A request in its tenant's queue. Each is itself alone, whatever it holds."""

    tenant: str
    since_s: float
    expires_s: float


_Rank = tuple[float, float, float, str]  # what a tenant has, what it had, how long it waits; name


@dataclass(slots=True)
class _Tenant:
    """A tenant with a delivery or a request. `turn` is what it has begun, over its weight; `rank`
    is its place among those that could begin, if it is one of them.
    """

    turn: float
    running: int = 0
    rank: _Rank | None = None
    queue: OrderedDict[Waiting, None] = field(default_factory=OrderedDict)


class Admission:
    """The state of all tenants. Not safe to use from several threads."""

    def __init__(
        self, limits: AdmissionLimits, shares: Mapping[str, TenantShare] | None = None
    ) -> None:
        self._running = FairShares(limits.deliveries_max)
        self._places = FairShares(limits.waiting_max)  # of requests that wait
        self._limits = limits
        self._shares = dict(shares or {})
        self._tenants: dict[str, _Tenant] = {}
        self._ready = SortedList()  # ranks of the tenants that wait for others alone
        self._waiting: OrderedDict[Waiting, None] = OrderedDict()  # of all, the oldest first
        self._durations_s: OrderedDict[str, float] = OrderedDict()  # averages, by tenant
        self._duration_s = DURATION_UNKNOWN_S  # the average of all
        self._turn = 0.0  # of the tenant that began last

    @property
    def running(self) -> int:
        """Deliveries that run."""
        return self._running.taken

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def is_held_from_others(self, tenant: str) -> bool:
        """Whether a request of its own waits for others, or one whose tenant has fewer deliveries
        for its weight.
        """
        state = self._tenants.get(tenant)
        if state is None or not self._ready:
            return False
        weighed = state.running / self._weight(tenant)
        return state.rank is not None or bool(self._ready[0][0] < weighed)

    @property
    def next_expiry_s(self) -> float | None:
        """When the oldest waiting request has waited too long; None where nobody waits."""
        return next(iter(self._waiting)).expires_s if self._waiting else None

    def enter(self, tenant: str, now_s: float) -> Waiting | None:
        """A delivery begins (None), or waits. Raises `Busy` where the queue is full.

        `leave` ends one that began; one that waits begins when its token is returned by a later
        call, and ends its wait with `give_up` or `expired`.
        """
        state = self._tenants.get(tenant) or _Tenant(self._turn)
        if self._has_room(tenant, state):
            self._tenants[tenant] = state
            self._begin(tenant, state)
            return None
        self._check_queues(tenant, state)
        token = Waiting(tenant, now_s, now_s + self._limits.queue_timeout_s)
        state.queue[token] = self._waiting[token] = None
        self._places.take(tenant, 1)
        self._tenants[tenant] = state
        self._place(tenant, state)
        return token

    def leave(self, tenant: str, duration_s: float | None) -> list[Waiting]:
        """A delivery ended after this time; None is one that did nothing. Returns the requests that
        begin now.
        """
        state = self._tenants[tenant]
        assert state.running > 0, f"no delivery of {tenant!r} is running"
        state.running -= 1
        self._running.give_back(tenant, 1)
        if duration_s is not None:
            self._remember(tenant, duration_s)
        self._place(tenant, state)
        return self._begin_waiting()

    def give_up(self, token: Waiting) -> None:
        """A request waits no longer. No effect on one that does not wait."""
        if token in self._waiting:
            self._place(token.tenant, self._dequeue(token))

    def expired(self, now_s: float) -> list[tuple[Waiting, Busy]]:
        """The requests that have waited too long, and what each is told. They wait no longer."""
        late: list[tuple[Waiting, Busy]] = []
        while self._waiting and (token := next(iter(self._waiting))).expires_s <= now_s:
            late.append((token, self._timed_out(token)))
            self.give_up(token)
        return late

    def configure(self, shares: Mapping[str, TenantShare]) -> list[Waiting]:
        """Other shares from now on. Returns the requests that begin now.

        A tenant that has more deliveries than it may have keeps them, and begins none.
        """
        self._shares = dict(shares)
        for tenant, state in list(self._tenants.items()):
            self._place(tenant, state)
        return self._begin_waiting()

    def retry_after_s(self, tenant: str) -> float:
        """When the tenant's queue as it stands has begun, by what its deliveries took lately."""
        state = self._tenants.get(tenant)
        ahead = len(state.queue) + 1 if state else 1
        at_once = max(1, state.running if state else 0)
        estimate_s = self._durations_s.get(tenant, self._duration_s) * ahead / at_once
        return min(max(estimate_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)

    # --- who begins ---

    def _has_room(self, tenant: str, state: _Tenant) -> bool:
        return state.running < self._tenant_deliveries_max(tenant) and self._has_share(tenant)

    def _has_share(self, tenant: str) -> bool:
        return self._running.may_take(tenant, 1, self._weight(tenant))

    def _tenant_deliveries_max(self, tenant: str) -> int:
        share = self._shares.get(tenant, _EVERYBODY)
        return share.deliveries_max or self._limits.tenant_deliveries_max

    def _weight(self, tenant: str) -> float:
        return self._shares.get(tenant, _EVERYBODY).weight

    def _begin(self, tenant: str, state: _Tenant) -> None:
        self._turn = max(self._turn, state.turn)
        state.turn += 1 / self._weight(tenant)
        state.running += 1
        self._running.take(tenant, 1)

    def _begin_waiting(self) -> list[Waiting]:
        begun: list[Waiting] = []
        while (tenant := self._next_tenant()) is not None:
            state = self._tenants[tenant]
            token = next(iter(state.queue))
            self._dequeue(token)
            self._begin(tenant, state)
            self._place(tenant, state)
            begun.append(token)
        return begun

    def _next_tenant(self) -> str | None:
        """The first of those that could begin whose share leaves room for it."""
        if self._running.free <= 0:
            return None
        tenants = (str(rank[-1]) for rank in self._ready)
        return next((one for one in tenants if self._has_share(one)), None)

    def _dequeue(self, token: Waiting) -> _Tenant:
        state = self._tenants[token.tenant]
        self._places.give_back(token.tenant, 1)
        del state.queue[token]
        del self._waiting[token]
        return state

    def _place(self, tenant: str, state: _Tenant) -> None:
        """After any change of a tenant: its place among those that could begin, or none."""
        if state.rank is not None:
            self._ready.remove(state.rank)
            state.rank = None
        if state.queue:
            if state.running < self._tenant_deliveries_max(tenant):
                state.rank = self._rank(tenant, state)
                self._ready.add(state.rank)
        elif not state.running:
            del self._tenants[tenant]

    def _rank(self, tenant: str, state: _Tenant) -> _Rank:
        since_s = next(iter(state.queue)).since_s
        return state.running / self._weight(tenant), state.turn, since_s, tenant

    # --- who is refused ---

    def _check_queues(self, tenant: str, state: _Tenant) -> None:
        queue_max, waiting_max = self._limits.queue_max, self._limits.waiting_max
        if len(state.queue) >= queue_max:
            queue = f"its queue is full (scheduler.queue_max is {queue_max})"
        elif not self._places.may_take(tenant, 1):
            queue = f"{self.waiting} requests of all tenants wait, at most {waiting_max} may"
        else:
            return
        raise Busy(
            f"{self._bound(tenant, state)}; {queue}", retry_after_s=self.retry_after_s(tenant)
        )

    def _timed_out(self, token: Waiting) -> Busy:
        bound = self._bound(token.tenant, self._tenants[token.tenant])
        return Busy(
            f"{bound}; the request waited {self._limits.queue_timeout_s:g} s for its turn "
            "(scheduler.queue_timeout_s)",
            retry_after_s=self.retry_after_s(token.tenant),
        )

    def _bound(self, tenant: str, state: _Tenant) -> str:
        """What keeps a request of this tenant from running."""
        if state.running < (most := self._tenant_deliveries_max(tenant)):
            return (
                f"{self.running} deliveries are running, {state.running} of them of {tenant!r}; "
                f"storage.deliveries_max is {self._limits.deliveries_max}"
            )
        own = self._shares.get(tenant, _EVERYBODY).deliveries_max
        name = "its deliveries_max" if own else "scheduler.tenant_deliveries_max"
        return f"{state.running} deliveries of {tenant!r} are running, {name} is {most}"

    # --- what is remembered ---

    def _remember(self, tenant: str, duration_s: float) -> None:
        known_s = self._durations_s.pop(tenant, duration_s)
        self._durations_s[tenant] = known_s + DURATION_WEIGHT * (duration_s - known_s)
        self._duration_s += DURATION_WEIGHT * (duration_s - self._duration_s)
        if len(self._durations_s) > IDLE_TENANTS_MAX:
            self._durations_s.popitem(last=False)

    def __repr__(self) -> str:
        limits = self._limits
        return (
            f"<Admission {self.running}/{limits.deliveries_max} running, "
            f"{self.waiting}/{limits.waiting_max} waiting>"
        )
