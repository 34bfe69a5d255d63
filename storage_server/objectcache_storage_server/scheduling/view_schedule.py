"""What an operator sees of the schedule: copied under the dispatcher's lock, told outside of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple, Protocol, TypeVar

from objectcache_schemas.operators.schedule import (
    ScheduleChanges,
    ScheduleConfiguration,
    ScheduledDelivery,
    ScheduledNic,
    ScheduleState,
)
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.lanes.delivery_flow import ScheduledJob
from objectcache_storage_server.scheduling.lanes.nic_paces import Destination
from objectcache_storage_server.scheduling.scheduler import Scheduler

SCHEDULED_DELIVERIES_SHOWN = SCHEDULED_NICS_SHOWN = 1000


class NamedJob(ScheduledJob, Protocol):
    """A delivery of which an operator is told what the scheduler itself does not ask."""

    @property
    def name(self) -> str: ...

    @property
    def window_source(self) -> str: ...

    @property
    def decoded_bytes(self) -> int: ...


J = TypeVar("J", bound=NamedJob)

# job, demand, pooled, rate_bytes_per_s, sent_bytes, consumed_layers, begun_s: plain tuples, because
# nothing is chosen while they are made
_Row = tuple[NamedJob, Demand, bool, float | None, int, int, float]


class ScheduleCopy(NamedTuple):
    """The scheduler's numbers at one moment."""

    now_s: float
    configuration: ScheduleConfiguration
    rows: list[_Row]
    delivery_count: int
    rate_bytes_per_s: float
    nics: tuple[ScheduledNic, ...]

    def state(self, changes: ScheduleChanges, waiting: int) -> ScheduleState:
        """The same in an operator's words; `waiting` requests stand at the entrance."""
        return ScheduleState(
            configuration=self.configuration,
            changes=changes,
            deliveries=tuple(_scheduled(*row, self.now_s) for row in self.rows),
            delivery_count=self.delivery_count,
            waiting=waiting,
            rate_bytes_per_s=self.rate_bytes_per_s,
            nics=self.nics,
        )


def copy_schedule(scheduler: Scheduler[J], now_s: float) -> ScheduleCopy:
    """Of the first deliveries; called under the dispatcher's lock."""
    flows = scheduler.flows()
    rows: list[_Row] = [
        (
            flow.job,
            flow.demand,
            flow.pooled,
            flow.rate_bytes_per_s,
            flow.sent_bytes,
            flow.consumed_layers,
            flow.begun_s,
        )
        for flow in flows[:SCHEDULED_DELIVERIES_SHOWN]
    ]
    rate_bytes_per_s = scheduler.meter.rate_bytes_per_s(now_s)
    nics = copy_nics(scheduler, now_s)[:SCHEDULED_NICS_SHOWN]
    return ScheduleCopy(now_s, scheduler.configuration, rows, len(flows), rate_bytes_per_s, nics)


def copy_nics(scheduler: Scheduler[J], now_s: float) -> tuple[ScheduledNic, ...]:
    """All that are known; called under the dispatcher's lock."""
    queued_bytes: Counter[Destination] = Counter()
    known = scheduler.nics.known()
    if known:
        for flow in scheduler.flows():
            left_bytes = flow.demand.payload_bytes - flow.sent_bytes
            queued_bytes[flow.destination] += max(0, left_bytes)
    return tuple(
        ScheduledNic(
            tenant=nic.destination[0],
            nic=nic.destination[1],
            nic_bytes_per_s=nic.rate if nic.rate < math.inf else None,
            achieved_bytes_per_s=nic.meter.rate_bytes_per_s(now_s),
            sent_bytes=nic.sent_bytes,
            queued_bytes=queued_bytes[nic.destination],
            deliveries=nic.deliveries,
            held=scheduler.held_for(nic, now_s),
        )
        for nic in known
    )


def _scheduled(
    job: NamedJob,
    demand: Demand,
    pooled: bool,
    rate_bytes_per_s: float | None,
    sent_bytes: int,
    consumed_layers: int,
    begun_s: float,
    now_s: float,
) -> ScheduledDelivery:
    return ScheduledDelivery(
        request_id=job.name,
        tenant=demand.tenant,
        pooled=pooled,
        layer_bytes=demand.layer_bytes,
        num_layers=demand.num_layers,
        compute_window_s=demand.compute_window_s,
        window_source=job.window_source,
        rate_bytes_per_s=rate_bytes_per_s,
        sent_bytes=sent_bytes,
        payload_bytes=demand.payload_bytes,
        next_layer=min(sent_bytes // demand.layer_bytes, demand.num_layers),
        consumed_layers=consumed_layers,
        age_s=max(0.0, now_s - begun_s),
        nic=demand.nic,
        decoded_bytes=job.decoded_bytes,
    )
