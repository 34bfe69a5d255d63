"""The scheduler: lanes behind one link, epochs, and what an operator may change while it runs.

Pure: the dispatcher calls it under its lock with the time, and so does the simulator, under virtual
time. Three kinds of deliveries:

- pooled ones (layerwise, with a compute window) under a policy that assigns rates: admitted at an
  epoch's end, at a rate for their life (paper, section 3.6);
- pooled ones under stall_dynamic: by due time;
- all others (chunkwise, without a window, single objects; and everybody, where a policy that
  assigns rates has no cap to divide): fair turns.

Bytes that go are paced against the cap. Pooled deliveries and the others divide it in proportion to
what each side is entitled to, and either side may use what the other leaves.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Generic

from objectcache_schemas.schedule import ScheduleConfiguration, TenantShare
from objectcache_storage_server.plan import Fragment
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes import FairLane, Lane, RateLane
from objectcache_storage_server.scheduling.link import Pace, RateMeter
from objectcache_storage_server.scheduling.policies import assigned_rates
from objectcache_storage_server.scheduling.urgent_lane import UrgentLane

BYTES_PER_GBIT = 1e9 / 8
DYNAMIC = "stall_dynamic"
LINK_CATCH_UP_S = 0.002  # so that a thread that woke late loses nothing
FRAGMENT_S = 0.0005  # of the cap: with the catch-up well under 2 % of 200 ms
FAIR_FLOOR = 0.02  # of the cap, for fair turns, where rates leave nothing
ADMIT_FRACTION = 0.5  # of the rate that an empty link would give: less is not worth a life with it
NEED_MAX = 4.0  # of the cap: that a delivery may say it needs; bw_prop divides by what they say
ADMITTED_MAX = 1024  # deliveries in one epoch
STARTED_MAX = 32  # of them in one decision, so that none takes long
NO_SHARE = TenantShare()


@dataclass(frozen=True, slots=True)
class Grant(Generic[JobT]):
    """This fragment of this job goes now."""

    job: JobT
    fragment: Fragment


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing may go before `until_s`; infinity: before something changes."""

    until_s: float


class Scheduler(Generic[JobT]):
    """Whose fragment goes next."""

    def __init__(self, configuration: ScheduleConfiguration, now_s: float) -> None:
        self.meter = RateMeter()
        self._flows: dict[JobT, Flow[JobT]] = {}
        self._waiting: dict[Flow[JobT], None] = {}  # for an epoch's end, in order of arrival
        self._fair: FairLane[JobT] = FairLane()
        self._rated: RateLane[JobT] = RateLane()
        self._urgent: UrgentLane[JobT] = UrgentLane(self._pool_capacity)
        self._tags = {id(self._fair): 0.0, id(self._rated): 0.0, id(self._urgent): 0.0}
        self._tenants: dict[str, Pace] = {}
        self._link = Pace(math.inf, LINK_CATCH_UP_S, now_s)
        self._rates_wanted: dict[Flow[JobT], float] = {}  # by those an epoch looks at
        self._rates_found: dict[Flow[JobT], float] = {}  # of those who begin in the next decisions
        self._next_epoch_s = now_s
        self._may_admit = False  # something has changed since the last epoch
        self.configure(configuration, now_s)

    # --- configuration ---

    def configure(self, configuration: ScheduleConfiguration, now_s: float) -> None:
        """Take another configuration over. Rates of running deliveries are assigned anew."""
        self.configuration = configuration
        self.cap_bytes_per_s = configuration.cap_gbps * BYTES_PER_GBIT or math.inf
        self._margin_bytes_per_s = configuration.margin_gbps * BYTES_PER_GBIT
        self._link.change(self.cap_bytes_per_s, now_s)
        self._tenants = {
            name: Pace(share.cap_gbps * BYTES_PER_GBIT, LINK_CATCH_UP_S, now_s)
            for name, share in configuration.tenants.items()
            if share.cap_gbps
        }
        flows = list(self._flows.values())
        self._rates_found, self._rates_wanted = {}, {}
        for flow in flows:
            self._leave(flow)
            flow.demand = self._seen(flow.demand)
        for flow in flows:
            self._join(flow, now_s)
        self._next_epoch_s = now_s
        if self._waiting:
            self._end_epoch(now_s)
            self._start_some(now_s)

    def _share(self, tenant: str) -> TenantShare:
        return self.configuration.tenants.get(tenant, NO_SHARE)

    def _seen(self, demand: Demand) -> Demand:
        """With its tenant's weight, and a window that nobody can claim the whole link with."""
        window_s = demand.compute_window_s
        if window_s:
            window_s = max(window_s, demand.layer_bytes / (NEED_MAX * self.cap_bytes_per_s))
        weight = self._share(demand.tenant).weight
        return Demand(demand.layer_bytes, window_s, demand.num_layers, weight, demand.tenant)

    @property
    def _assigns_rates(self) -> bool:
        return self.configuration.policy != DYNAMIC and self.cap_bytes_per_s < math.inf

    def fragment_bytes_max(self) -> float:
        """Pieces larger than this make the rate uneven; infinity without a cap."""
        return self.cap_bytes_per_s * FRAGMENT_S

    # --- deliveries come and go ---

    def add(
        self,
        job: JobT,
        demand: Demand,
        now_s: float,
        *,
        pooled: bool,
        rate_max: float = math.inf,
    ) -> None:
        """A delivery begins; its tenant's weight replaces the demand's."""
        flow = Flow(job, self._seen(demand), pooled=pooled, rate_max=rate_max, now_s=now_s)
        self._flows[job] = flow
        self._join(flow, now_s)

    def _join(self, flow: Flow[JobT], now_s: float) -> None:
        if flow.pooled and self._assigns_rates:
            if not self._waiting:  # whoever comes within an epoch of it is admitted with it
                self._next_epoch_s = max(self._next_epoch_s, now_s + self.configuration.epoch_s)
            self._may_admit = True
            flow.is_waiting = True
            self._waiting[flow] = None
            return
        flow.assign(None, now_s)
        lane = self._lane(flow)
        self._enter(lane, flow, now_s)
        flow.job.admitted(None)

    def _lane(self, flow: Flow[JobT]) -> Lane[JobT]:
        if not flow.pooled:
            return self._fair
        if self.configuration.policy == DYNAMIC:
            return self._urgent
        return self._rated if self._assigns_rates else self._fair

    def _enter(self, lane: Lane[JobT], flow: Flow[JobT], now_s: float) -> None:
        if not lane.flows:  # a lane that was empty has no claim on the past
            others = [self._tag(other) for other in self._lanes() if other.flows]
            self._tags[id(lane)] = max([self._tag(lane), *others])
        lane.add(flow, now_s)

    def remove(self, job: JobT, now_s: float) -> None:
        """A delivery has ended, whichever way; its share is free. A second call has no effect."""
        flow = self._flows.pop(job, None)
        if flow is not None:
            self._leave(flow)

    def _leave(self, flow: Flow[JobT]) -> None:
        self._waiting.pop(flow, None)
        self._rates_found.pop(flow, None)
        self._rates_wanted.pop(flow, None)
        self._may_admit = True
        flow.is_waiting = False
        for lane in self._lanes():
            lane.discard(flow)

    def wake(self, job: JobT, now_s: float) -> None:
        """A delivery has room again."""
        flow = self._flows.get(job)
        if flow is None:
            return
        if flow.is_waiting:
            flow.is_asleep = False
        else:
            self._lane(flow).wake(flow, now_s)

    def consumed(self, job: JobT, layers: int, now_s: float) -> None:
        """The GPU is through with the first `layers` layers of a delivery."""
        flow = self._flows.get(job)
        if flow is not None:
            flow.consumed(layers, now_s)

    # --- who goes next ---

    def next(self, now_s: float) -> Grant[JobT] | Wait:
        """The next fragment, or how long there is none."""
        if self._waiting:
            self._admit(now_s)
        if self._link.next_at_s > now_s:
            return Wait(self._link.next_at_s)
        until_s = self._next_admission_s(now_s)
        idle: list[Lane[JobT]] = []
        for lane in sorted(self._lanes(), key=self._tag):
            tag = self._tag(lane)
            granted = self._from_lane(lane, now_s)
            if granted is not None:
                for other in idle:  # what a lane had nothing to send for is not owed to it
                    self._tags[id(other)] = max(tag, self._tag(other))
                return granted
            idle.append(lane)
            until_s = min(until_s, lane.wake_at_s)
        return Wait(until_s)

    def _tag(self, lane: Lane[JobT]) -> float:
        """What a lane was sent, over what it is entitled to."""
        return self._tags[id(lane)]

    def _lanes(self) -> tuple[Lane[JobT], Lane[JobT], Lane[JobT]]:
        return self._rated, self._urgent, self._fair

    def _from_lane(self, lane: Lane[JobT], now_s: float) -> Grant[JobT] | None:
        while (flow := lane.choose(now_s)) is not None:
            tenant = self._tenants.get(flow.demand.tenant)
            if tenant is not None and tenant.next_at_s > now_s:
                lane.hold(flow, tenant.next_at_s)
                continue
            if flow.pace.next_at_s > now_s:
                lane.park(flow, flow.pace.next_at_s)
                continue
            fragment = flow.job.take()
            if fragment is None:
                lane.sleep(flow)
                continue
            self._charge(lane, flow, fragment.length_bytes, now_s)
            return Grant(flow.job, fragment)
        return None

    def _charge(self, lane: Lane[JobT], flow: Flow[JobT], length_bytes: int, now_s: float) -> None:
        self._link.charge(length_bytes, now_s)
        flow.pace.charge(length_bytes, now_s)
        if tenant := self._tenants.get(flow.demand.tenant):
            tenant.charge(length_bytes, now_s)
            for other in self._lanes():
                other.let_go(flow.demand.tenant, tenant.next_at_s)
        flow.sent(length_bytes, max(now_s, self._link.next_at_s))
        lane.sent(flow, length_bytes, now_s)
        self._tags[id(lane)] += length_bytes / self._entitled(lane)
        self.meter.add(length_bytes, now_s)

    # --- who is entitled to how much ---

    def _entitled(self, lane: Lane[JobT]) -> float:
        """What a lane's flows may claim of the link, against what the other lane's may."""
        if not self._assigns_rates:
            return lane.weight or 1.0
        rated = self._rated.rate_bytes_per_s
        if lane is self._rated:
            return rated or 1.0
        return max(self.cap_bytes_per_s - rated, FAIR_FLOOR * self.cap_bytes_per_s)

    def _pool_capacity(self, now_s: float) -> float:
        """What the pooled flows get together: of the cap, or of what was reached lately."""
        capacity = self.cap_bytes_per_s
        if capacity == math.inf:
            capacity = self.meter.peak_bytes_per_s(now_s) or math.inf
        if capacity == math.inf:
            return 1e12  # nothing was measured yet: as if the link took no time
        weight = self._urgent.weight
        return capacity * weight / (weight + self._fair.weight) if weight else capacity

    def _pool_budget(self) -> float:
        """What the policy may divide: the cap, less a fair share for those that have no rates."""
        rated = self._rated.weight + sum(flow.demand.weight for flow in self._waiting)
        return self.cap_bytes_per_s * rated / (rated + self._fair.weight)

    # --- epochs ---

    def _next_admission_s(self, now_s: float) -> float:
        if self._rates_found or self._rates_wanted:
            return now_s
        return self._next_epoch_s if self._waiting and self._may_admit else math.inf

    def _admit(self, now_s: float) -> None:
        """At an epoch's end, give rates to those who wait. Takes several decisions, so that none
        takes long.
        """
        if self._rates_found:
            self._start_some(now_s)
        elif self._rates_wanted:
            self._divide_what_is_free()
        elif self._may_admit and now_s >= self._next_epoch_s:
            self._end_epoch(now_s)

    def _end_epoch(self, now_s: float) -> None:
        """Find what those who wait should have: where nobody has a rate, they get it."""
        self._may_admit = False
        self._next_epoch_s = now_s + self.configuration.epoch_s
        waiting = list(itertools.islice(self._waiting, ADMITTED_MAX))
        running = list(self._rated.flows)
        budget = self._pool_budget()
        if budget - self._rated.rate_bytes_per_s <= 0:
            return
        rates = self._rates([*running, *waiting], budget)[len(running) :]
        found = dict(zip(waiting, rates, strict=True))
        if running:
            self._rates_wanted = found
        else:
            self._rates_found = found

    def _divide_what_is_free(self) -> None:
        """Where that gives somebody less than half of what the whole link would, the first half of
        those who wait is tried in the next decision; the others wait for more.
        """
        wanted, self._rates_wanted = self._rates_wanted, {}
        waiting = list(wanted)
        free = self._pool_budget() - self._rated.rate_bytes_per_s
        if free <= 0:
            return
        found = dict(zip(waiting, self._rates(waiting, free), strict=True))
        if all(rate >= ADMIT_FRACTION * wanted[flow] for flow, rate in found.items()):
            self._rates_found = found
        else:
            self._rates_wanted = {flow: wanted[flow] for flow in waiting[: len(waiting) // 2]}

    def _start_some(self, now_s: float) -> None:
        for flow in list(itertools.islice(self._rates_found, STARTED_MAX)):
            self._start(flow, self._rates_found.pop(flow), now_s)

    def _rates(self, flows: list[Flow[JobT]], budget: float) -> list[float]:
        caps = {name: pace.rate_bytes_per_s for name, pace in self._tenants.items()}
        return assigned_rates(
            self.configuration.policy,
            [flow.demand for flow in flows],
            budget,
            self._margin_bytes_per_s,
            caps,
        )

    def _start(self, flow: Flow[JobT], rate_bytes_per_s: float, now_s: float) -> None:
        del self._waiting[flow]
        flow.is_waiting = False
        flow.assign(rate_bytes_per_s, now_s)
        if not flow.sent_bytes:
            flow.begun_s = flow.origin_s = flow.planned_s = now_s
        self._enter(self._rated, flow, now_s)
        flow.job.admitted(flow.rate_bytes_per_s)

    # --- the view from outside ---

    def flow(self, job: JobT) -> Flow[JobT] | None:
        """A delivery's account."""
        return self._flows.get(job)

    def flows(self) -> list[Flow[JobT]]:
        """The accounts of all deliveries."""
        return list(self._flows.values())

    def __repr__(self) -> str:
        return (
            f"<Scheduler {self.configuration.policy}, {len(self._flows)} deliveries, "
            f"{len(self._waiting)} waiting>"
        )
