"""Who may begin a delivery now, who waits for a turn, and who is told to come back.

A delivery runs while its tenant has fewer than it may have at once, and fewer than its share of
`deliveries_max`, which leaves room to whoever comes next (`fair_shares`). Past that a request waits
in its tenant's queue, first come, first served. Whenever a delivery ends the next one of some
tenant begins: of the one that `tenant_queues` says, by what each has and had for its weight. So a
tenant's queue holds up that tenant alone. No request waits that could run. A tenant's small gets
are one more tenant's here (`holders`), with the same weight and bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.errors import Busy
from objectcache_schemas.operators.schedule import TenantShare
from objectcache_storage_server.admission.holders import holders_tenant
from objectcache_storage_server.admission.tenant_queues import TenantQueues, waiting_max

RETRY_AFTER_MIN_S, RETRY_AFTER_MAX_S = 0.1, 30.0
DURATION_UNKNOWN_S = 1.0  # of a delivery, before any has ended
DURATION_WEIGHT = 0.2  # of the latest delivery in a tenant's average: it remembers about ten
IDLE_TENANTS_MAX = 4096  # whose average is remembered
_EVERYBODY = TenantShare()


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


class Admission:
    """The state of all tenants. Not safe to use from several threads."""

    def __init__(
        self, limits: AdmissionLimits, shares: Mapping[str, TenantShare] | None = None
    ) -> None:
        self._running = FairShares(limits.deliveries_max)
        self._queues: TenantQueues[Waiting] = TenantQueues(limits.queue_max)
        self._limits = limits
        self._shares = dict(shares or {})
        self._waiting: OrderedDict[Waiting, None] = OrderedDict()  # of all, the oldest first
        self._durations_s: OrderedDict[str, float] = OrderedDict()  # averages, by tenant
        self._duration_s = DURATION_UNKNOWN_S  # the average of all

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
        ready = self._queues.ready
        first = ready.first
        return first is not None and (tenant in ready or first[0] < self._weighed(tenant))

    @property
    def next_expiry_s(self) -> float | None:
        """When the oldest waiting request has waited too long; None where nobody waits."""
        return next(iter(self._waiting)).expires_s if self._waiting else None

    def enter(self, tenant: str, now_s: float) -> Waiting | None:
        """A delivery begins (None), or waits. Raises `Busy` where the queue is full.

        `leave` ends one that began; one that waits begins when its token is returned by a later
        call, and ends its wait with `give_up` or `expired`.
        """
        if self._is_ready(tenant) and self._has_share(tenant):
            self._begin(tenant)
            return None
        self._check_queues(tenant)
        token = Waiting(tenant, now_s, now_s + self._limits.queue_timeout_s)
        self._waiting[token] = None
        self._queues.add(tenant, token)
        self._place(tenant)
        return token

    def leave(self, tenant: str, duration_s: float | None) -> list[Waiting]:
        """A delivery ended after this time; None is one that did nothing. Returns the requests that
        begin now.
        """
        self._running.give_back(tenant, 1)
        if duration_s is not None:
            self._remember(tenant, duration_s)
        self._place(tenant)
        return self._begin_waiting()

    def give_up(self, token: Waiting) -> None:
        """A request waits no longer. No effect on one that does not wait."""
        if token in self._waiting:
            self._dequeue(token)
            self._place(token.tenant)

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
        for tenant in {token.tenant for token in self._waiting}:
            self._place(tenant)
        return self._begin_waiting()

    def retry_after_s(self, tenant: str) -> float:
        """When the tenant's queue as it stands has begun, by what its deliveries took lately."""
        ahead = self._queues.length(tenant) + 1
        at_once = max(1, self._running.held(tenant))
        estimate_s = self._durations_s.get(tenant, self._duration_s) * ahead / at_once
        return min(max(estimate_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)

    # --- who begins ---

    def _is_ready(self, tenant: str) -> bool:
        """Whether it has fewer than its own bound, so that it waits for others alone."""
        return self._running.held(tenant) < self._tenant_deliveries_max(tenant)

    def _has_share(self, tenant: str) -> bool:
        return self._running.may_take(tenant, 1, self._weight(tenant))

    def _tenant_deliveries_max(self, tenant: str) -> int:
        return self._share(tenant).deliveries_max or self._limits.tenant_deliveries_max

    def _weight(self, tenant: str) -> float:
        return self._share(tenant).weight

    def _share(self, tenant: str) -> TenantShare:
        return self._shares.get(holders_tenant(tenant), _EVERYBODY)

    def _weighed(self, tenant: str) -> float:
        """What it has, over its weight."""
        return self._running.held(tenant) / self._weight(tenant)

    def _begin(self, tenant: str) -> None:
        self._running.take(tenant, 1)
        self._queues.served(tenant, self._weight(tenant))

    def _begin_waiting(self) -> list[Waiting]:
        begun: list[Waiting] = []
        while (tenant := self._next_tenant()) is not None:
            token = self._queues.oldest(tenant)
            self._dequeue(token)
            self._begin(tenant)
            self._place(tenant)
            begun.append(token)
        return begun

    def _next_tenant(self) -> str | None:
        """The first of those that could begin whose share leaves room for it."""
        if self._running.free <= 0:
            return None
        return next((one for one in self._queues.ready if self._has_share(one)), None)

    def _dequeue(self, token: Waiting) -> None:
        self._queues.remove(token.tenant, token)
        del self._waiting[token]

    def _place(self, tenant: str) -> None:
        """After any change of a tenant."""
        self._queues.place(tenant, self._weighed(tenant), is_ready=self._is_ready(tenant))

    # --- who is refused ---

    def _check_queues(self, tenant: str) -> None:
        queue_max, waiting_max = self._limits.queue_max, self._limits.waiting_max
        if self._queues.is_full(tenant):
            queue = f"its queue is full (scheduler.queue_max is {queue_max})"
        elif not self._queues.has_place(tenant):
            queue = f"{self.waiting} requests of all tenants wait, at most {waiting_max} may"
        else:
            return
        raise Busy(f"{self._bound(tenant)}; {queue}", retry_after_s=self.retry_after_s(tenant))

    def _timed_out(self, token: Waiting) -> Busy:
        bound, timeout_s = self._bound(token.tenant), self._limits.queue_timeout_s
        return Busy(
            f"{bound}; the request waited {timeout_s:g} s for its turn (scheduler.queue_timeout_s)",
            retry_after_s=self.retry_after_s(token.tenant),
        )

    def _bound(self, tenant: str) -> str:
        """What keeps a request of this tenant from running."""
        running, most = self._running.held(tenant), self._tenant_deliveries_max(tenant)
        if running < most:
            return (
                f"{self.running} deliveries are running, {running} of them of {tenant!r}; "
                f"storage.deliveries_max is {self._limits.deliveries_max}"
            )
        own = self._share(tenant).deliveries_max
        name = "its deliveries_max" if own else "scheduler.tenant_deliveries_max"
        return f"{running} deliveries of {tenant!r} are running, {name} is {most}"

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
