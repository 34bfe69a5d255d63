"""The scheduler: lanes behind one link, epochs, and what an operator may change while it runs.

Pure: the dispatcher calls it under its lock with the time, and so does the simulator, under virtual
time. Three kinds of deliveries:

- pooled ones (layerwise, with a compute window) under a policy that assigns rates: at a rate that
  holds until an epoch's end, or for their life (paper, section 3.6);
- pooled ones under stall_dynamic: by due time;
- all others (chunkwise, without a window, single objects; and everybody, where a policy that
  assigns rates has no cap to divide): fair turns.

Bytes that go are paced against the cap, and those to a storage NIC of which a rate is known against
that, too. Pooled deliveries and the others divide the cap in proportion to what each side is
entitled to, and either side may use what the other leaves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Generic

from objectcache_schemas.operators.schedule import ScheduleConfiguration
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.delivery_flow import Flow, JobT
from objectcache_storage_server.scheduling.lanes.fair_lane import MOVED_MAX, FairLane, FlowLane
from objectcache_storage_server.scheduling.lanes.nic_paces import Nic, NicPaces
from objectcache_storage_server.scheduling.lanes.pace_link import Pace, RateMeter, TenantPaces
from objectcache_storage_server.scheduling.lanes.rate_lane import RateLane
from objectcache_storage_server.scheduling.lanes.split_link import Sides
from objectcache_storage_server.scheduling.lanes.urgent_lane import UrgentLane
from objectcache_storage_server.scheduling.rates.assign_at_epochs import Epochs
from objectcache_storage_server.scheduling.schedule_terms import BYTES_PER_GBIT as BYTES_PER_GBIT
from objectcache_storage_server.scheduling.schedule_terms import Terms
from objectcache_storage_server.scheduling.scheduler_answers import NextFragment as NextFragment
from objectcache_storage_server.scheduling.scheduler_answers import Wait as Wait

LINK_CATCH_UP_S = 0.002  # so that a thread that woke late loses nothing
NIC_CATCH_UP_S = 0.05  # a NIC is idle while those that go elsewhere have their turns
FRAGMENT_S = 0.0005  # of the cap: with the catch-up well under 2 % of 200 ms


class Scheduler(Generic[JobT]):
    """Whose fragment goes next."""

    def __init__(self, configuration: ScheduleConfiguration, now_s: float) -> None:
        self.meter = RateMeter()
        self._flows: dict[JobT, Flow[JobT]] = {}
        self._fair: FairLane[JobT] = FairLane()
        self._sides = Sides()
        self._rated: RateLane[JobT] = RateLane(self._sides)
        self._urgent: UrgentLane[JobT] = UrgentLane(self._pool_capacity, self._pool_bound)
        self._lanes: tuple[FlowLane[JobT], ...] = (self._rated, self._urgent, self._fair)
        self._epochs: Epochs[JobT] = Epochs(self._rated, self._sides)
        self._tenants = TenantPaces(LINK_CATCH_UP_S)
        self.nics = NicPaces(NIC_CATCH_UP_S)
        self._link = Pace(math.inf, LINK_CATCH_UP_S, now_s)
        self._terms = Terms.of(configuration)
        self.configure(configuration, now_s)

    # --- configuration ---

    def configure(self, configuration: ScheduleConfiguration, now_s: float) -> None:
        """Take another configuration over. Rates of running deliveries are assigned anew, those of
        many in the next decisions. Who stays in its lane keeps its place.
        """
        self.configuration = configuration
        terms = Terms.of(configuration)
        moved: list[Flow[JobT]] = []
        if self._pool_lane(terms) is not self._pool_lane(self._terms):
            moved = [flow for flow in self._flows.values() if flow.pooled]
        for flow in moved:
            self._leave(flow, now_s)
        self._take_terms(terms, now_s)
        for flow in moved:
            self._join(flow, now_s)
        if terms.assigns_rates:
            for flow, rate_bytes_per_s in self._epochs.assign_anew(now_s):
                self._start(flow, rate_bytes_per_s, now_s)

    def _take_terms(self, terms: Terms, now_s: float) -> None:
        self._terms = terms
        self.cap_bytes_per_s = terms.cap_bytes_per_s
        self._link.change(terms.cap_bytes_per_s, now_s)
        self._tenants.change(terms.tenant_caps, now_s)
        self._sides.change(terms.tenant_weights)
        self._epochs.configure(terms, now_s)
        for flow in self._flows.values():
            flow.demand = terms.seen(flow.given)
        for lane in self._lanes:
            lane.let_go_anew(self._tenants.next_at_s)
        self._urgent.reckon_all_anew()

    def fragment_bytes_max(self, nic_bytes_per_s: float = math.inf) -> float:
        """Pieces larger than this, to a NIC of that rate, make the rate uneven; infinity without a
        cap.
        """
        return min(self.cap_bytes_per_s, nic_bytes_per_s) * FRAGMENT_S

    # --- deliveries come and go ---

    def add(
        self,
        job: JobT,
        demand: Demand,
        now_s: float,
        *,
        pooled: bool,
        rate_max: float = math.inf,
        nic_bytes_per_s: float | None = None,
    ) -> None:
        """A delivery begins; its tenant's weight replaces the demand's. `nic_bytes_per_s` is what
        the NIC that the demand names carries, as far as its client knows. A delivery that names
        one NIC more than its tenant may use counts as one that names none.
        """
        if demand.nic and not self.nics.admits((demand.tenant, demand.nic)):
            demand, nic_bytes_per_s = replace(demand, nic=""), None
        flow = Flow(job, demand, pooled=pooled, rate_max=rate_max, now_s=now_s)
        flow.nic_bytes_per_s = nic_bytes_per_s
        flow.demand = self._terms.seen(flow.given)
        self._flows[job] = flow
        self._join(flow, now_s)

    def _join(self, flow: Flow[JobT], now_s: float) -> None:
        lane = self._lane(flow)
        self._sides.add(flow.demand.tenant, pooled=lane.is_pooled)
        if flow.demand.nic:
            flow.nic = self.nics.enter(
                flow.destination, flow.nic_bytes_per_s, now_s, pooled=lane.is_pooled
            )
            flow.nic_bytes_per_s = None  # said once: others may say another one later
            self._nic_changed(flow, flow.nic)
        if lane is self._rated:
            self._epochs.join(flow, now_s)
            return
        self._epochs.changed()
        flow.assign(None, now_s)
        self._enter(lane, flow, now_s)
        flow.job.admitted(None)

    def _start(self, flow: Flow[JobT], rate_bytes_per_s: float, now_s: float) -> None:
        """An epoch has found a rate for it."""
        if flow in self._rated.flows:
            self._rated.assign(flow, rate_bytes_per_s, now_s)
        else:
            flow.assign(rate_bytes_per_s, now_s)
            if not flow.sent_bytes:
                flow.begun_s = flow.origin_s = flow.planned_s = now_s
            self._enter(self._rated, flow, now_s)
        flow.job.admitted(flow.rate_bytes_per_s)

    def _lane(self, flow: Flow[JobT]) -> FlowLane[JobT]:
        return self._pool_lane(self._terms) if flow.pooled else self._fair

    def _pool_lane(self, terms: Terms) -> FlowLane[JobT]:
        if terms.is_dynamic:
            return self._urgent
        return self._rated if terms.assigns_rates else self._fair

    def _enter(self, lane: FlowLane[JobT], flow: Flow[JobT], now_s: float) -> None:
        if not lane.flows:  # a lane that was empty has no claim on the past
            lane.tag = max([lane.tag, *(other.tag for other in self._lanes if other.flows)])
        lane.add(flow, now_s)

    def remove(self, job: JobT, now_s: float) -> None:
        """A delivery has ended, whichever way; its share is free. A second call has no effect."""
        flow = self._flows.pop(job, None)
        if flow is not None:
            self._leave(flow, now_s)

    def _leave(self, flow: Flow[JobT], now_s: float) -> None:
        lane = self._lane(flow)
        self._epochs.discard(flow)
        lane.discard(flow)
        self._sides.discard(flow.demand.tenant, pooled=lane.is_pooled)
        if flow.nic is not None:
            self.nics.leave(flow.nic, now_s, pooled=lane.is_pooled)
            self._nic_changed(flow, flow.nic)
            flow.nic = None

    def _nic_changed(self, flow: Flow[JobT], nic: Nic) -> None:
        """The NIC of this flow carries more or less, or is divided otherwise."""
        for lane in self._lanes:
            lane.let_go(flow.destination, self._next_at_s(lane, flow))
        self._urgent.nic_changed(nic)
        self._epochs.changed()

    def wake(self, job: JobT, now_s: float) -> None:
        """A delivery has room again."""
        if (flow := self._flows.get(job)) is None:
            return
        if flow.is_waiting:
            flow.asleep_since_s = None
            return
        if flow.is_idle(now_s) and not flow.is_sent:
            self._epochs.changed()
        self._lane(flow).wake(flow, now_s)

    def consumed(
        self, job: JobT, layers: int, now_s: float, compute_s: float | None = None
    ) -> None:
        """The GPU is through with the first `layers` layers of a delivery, each of which took it
        `compute_s`. A window that turns out to be another one is replaced; a rate for life stays.
        """
        if (flow := self._flows.get(job)) is None:
            return
        flow.consumed(layers, now_s, compute_s)
        if flow.pooled and (given := flow.measured()) is not None:
            seen = self._terms.seen(given)
            if flow.differs_from(seen):
                flow.take_over(given, seen, now_s)
                self._epochs.changed()
                self._urgent.reckon_anew(flow, now_s)

    # --- who goes next ---

    def next(self, now_s: float) -> NextFragment[JobT] | Wait:
        """The next fragment, or how long there is none."""
        for flow, rate_bytes_per_s in self._epochs.admit(now_s):
            self._start(flow, rate_bytes_per_s, now_s)
        until_s = self._epochs.next_at_s(now_s)
        if self._link.next_at_s > now_s:
            return Wait(min(until_s, self._link.next_at_s))
        idle: list[FlowLane[JobT]] = []
        for lane in sorted(self._lanes, key=lambda lane: lane.tag):
            if not lane.flows:
                idle.append(lane)
                continue
            tag = lane.tag
            chosen = self._from_lane(lane, now_s)
            if isinstance(chosen, Wait):
                return chosen
            if chosen is not None:
                for other in idle:  # what a lane had nothing to send for is not owed to it
                    other.tag = max(tag, other.tag)
                return chosen
            idle.append(lane)
            until_s = min(until_s, lane.wake_at_s)
        return Wait(until_s)

    def _from_lane(self, lane: FlowLane[JobT], now_s: float) -> NextFragment[JobT] | Wait | None:
        """None where nobody in the lane can go; a wait for no time where that took too many steps
        to find out.
        """
        for moved in range(MOVED_MAX):
            flow = lane.choose(now_s, again=moved > 0)
            if flow is None:
                return None
            next_at_s = self._next_at_s(lane, flow)
            if next_at_s > now_s:
                lane.hold(flow, next_at_s)
            elif flow.pace.next_at_s > now_s:
                lane.park(flow, flow.pace.next_at_s)
            elif (fragment := flow.job.take()) is None:
                lane.sleep(flow, now_s)
            else:
                self._charge(lane, flow, fragment.length_bytes, now_s)
                return NextFragment(flow.job, fragment)
        return Wait(now_s)

    def _next_at_s(self, lane: FlowLane[JobT], flow: Flow[JobT]) -> float:
        """When a flow of the lane may go, as far as its tenant and its NIC are concerned."""
        tenant_next_at_s = self._tenants.next_at_s(flow.demand.tenant)
        if flow.nic is None:
            return tenant_next_at_s
        return max(tenant_next_at_s, flow.nic.next_at_s(pooled=lane.is_pooled))

    def _charge(
        self, lane: FlowLane[JobT], flow: Flow[JobT], length_bytes: int, now_s: float
    ) -> None:
        self._link.charge(length_bytes, now_s)
        flow.pace.charge(length_bytes, now_s)
        tenant = flow.demand.tenant
        self._tenants.charge(tenant, length_bytes, now_s)
        arrives_s = max(now_s, self._link.next_at_s)
        if flow.nic is not None:
            pooled = lane.is_pooled
            flow.nic.charge(length_bytes, now_s, pooled=pooled)
            arrives_s = max(arrives_s, flow.nic.next_at_s(pooled=pooled))
        for other in self._lanes:
            if tenant in other.held:
                self._let_go_after(other, flow)
        flow.sent(length_bytes, arrives_s)
        lane.sent(flow, length_bytes, now_s)
        pool, fair = self._sides.claims(self._terms, self._rated.rate_bytes_per_s)
        lane.tag += length_bytes / (fair if lane is self._fair else pool)
        self.meter.add(length_bytes, now_s)

    def _let_go_after(self, lane: FlowLane[JobT], flow: Flow[JobT]) -> None:
        """A piece of the flow goes: those held in the lane for what it goes to wait until then."""
        tenant = flow.demand.tenant
        if self._tenants.has_cap(tenant):
            lane.let_go_tenant(tenant, self._tenants.next_at_s(tenant))
        else:
            lane.let_go(flow.destination, self._next_at_s(lane, flow))

    def _pool_capacity(self, now_s: float) -> float:
        """What the pooled flows get together: of the cap, or of what was reached lately."""
        capacity = self.cap_bytes_per_s
        if capacity == math.inf:
            capacity = self.meter.peak_bytes_per_s(now_s) or math.inf
        if capacity == math.inf:
            return 1e12  # nothing was measured yet: as if the link took no time
        return capacity * self._sides.pool_share

    def _pool_bound(self) -> float:
        """What the pooled flows may have of the cap; infinity without one."""
        return self.cap_bytes_per_s * self._sides.pool_share

    # --- the view from outside ---

    @property
    def assigned_bytes_per_s(self) -> float:
        """All rates together, but for those that are not used."""
        return self._rated.rate_bytes_per_s

    def held_for(self, nic: Nic, now_s: float) -> int:
        """Deliveries that could go but for their NIC, or their tenant's cap."""
        held = sum(lane.held_count(nic.destination) for lane in self._lanes)
        return held + self._urgent.standing_before(nic, now_s)

    def flow(self, job: JobT) -> Flow[JobT] | None:
        """A delivery's account."""
        return self._flows.get(job)

    def flows(self) -> list[Flow[JobT]]:
        """The accounts of all deliveries."""
        return list(self._flows.values())

    def __repr__(self) -> str:
        return (
            f"<Scheduler {self.configuration.policy}, {len(self._flows)} deliveries, "
            f"{len(self._epochs)} waiting>"
        )
