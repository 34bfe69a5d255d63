"""The schedule, the deliveries under way, and the traces of those before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.admin.serving.storage_servers import answers_of
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_schemas.messages.quotas import GetUsage, TenantActivity, Usage
from objectcache_schemas.operators.admin_api import (
    PAGE_ITEMS_MAX,
    DeliveriesReply,
    ScheduleChange,
    ScheduleReply,
    TraceChoice,
    TracesReply,
)
from objectcache_schemas.operators.schedule import (
    GetSchedule,
    ScheduledNic,
    ScheduleState,
    SetSchedule,
)
from objectcache_schemas.operators.traces import DeliveryTrace, GetTraces, Traces


def schedule_reply(state: ScheduleState) -> ScheduleReply:
    """A schedule as the API says it."""
    return ScheduleReply(**msgspec.structs.asdict(state))


async def get_schedule(call: Call[Nothing, Nothing]) -> ScheduleReply:
    """The schedule."""
    states = await answers_of(call.storage, GetSchedule(), ScheduleState)
    return schedule_reply(joined_schedule(states))


def joined_schedule(states: Sequence[ScheduleState]) -> ScheduleState:
    """What all servers do by the schedule that they share, together."""
    deliveries = [delivery for state in states for delivery in state.deliveries]
    return msgspec.structs.replace(
        states[0],
        deliveries=tuple(deliveries[:PAGE_ITEMS_MAX]),
        delivery_count=sum(state.delivery_count for state in states),
        waiting=sum(state.waiting for state in states),
        rate_bytes_per_s=sum(state.rate_bytes_per_s for state in states),
        nics=_joined_nics(one for state in states for one in state.nics),
    )


def _joined_nics(nics: Iterable[ScheduledNic]) -> tuple[ScheduledNic, ...]:
    """What goes to each, from all servers together; each of which paces it by itself."""
    joined: dict[tuple[str, str], ScheduledNic] = {}
    for one in nics:
        before = joined.get((one.tenant, one.nic))
        if before is not None:
            known = one.nic_bytes_per_s
            one = ScheduledNic(
                tenant=one.tenant,
                nic=one.nic,
                nic_bytes_per_s=before.nic_bytes_per_s if known is None else known,
                achieved_bytes_per_s=before.achieved_bytes_per_s + one.achieved_bytes_per_s,
                sent_bytes=before.sent_bytes + one.sent_bytes,
                queued_bytes=before.queued_bytes + one.queued_bytes,
                deliveries=before.deliveries + one.deliveries,
                held=before.held + one.held,
            )
        joined[one.tenant, one.nic] = one
    return tuple(joined.values())[:PAGE_ITEMS_MAX]


async def change_schedule(call: Call[ScheduleChange, Nothing]) -> ScheduleReply:
    """Change the schedule, and keep the change."""
    request = SetSchedule(changes=call.body.changes, reset=call.body.reset)
    return schedule_reply(await call.storage.call(request, ScheduleState))


async def list_deliveries(call: Call[Nothing, Nothing]) -> DeliveriesReply:
    """What is delivered now, and for whom."""
    state = joined_schedule(await answers_of(call.storage, GetSchedule(), ScheduleState))
    usages = await answers_of(call.storage, GetUsage(), Usage)
    return DeliveriesReply(
        at_s=call.now_s,
        deliveries=state.deliveries,
        delivery_count=state.delivery_count,
        waiting=state.waiting,
        rate_bytes_per_s=state.rate_bytes_per_s,
        tenants=joined_activity(usages),
    )


def joined_activity(usages: Iterable[Usage]) -> tuple[TenantActivity, ...]:
    """What goes on for each tenant, at all servers together."""
    joined: dict[str, TenantActivity] = {}
    for one in (tenant for usage in usages for tenant in usage.tenants):
        before = joined.get(one.identity)
        if before is not None:
            one = msgspec.structs.replace(
                one,
                in_flight_bytes=before.in_flight_bytes + one.in_flight_bytes,
                deliveries=before.deliveries + one.deliveries,
            )
        joined[one.identity] = one
    return tuple(joined[name] for name in sorted(joined))


async def latest_traces(storage: StorageFleet, request: GetTraces) -> tuple[DeliveryTrace, ...]:
    """The traces of all servers together, the latest first."""
    answers = await answers_of(storage, request, Traces)
    traces = [trace for answer in answers for trace in answer.traces]
    if len(answers) > 1:
        traces.sort(key=lambda trace: trace.started_unix_s, reverse=True)
    return tuple(traces[: request.limit])


async def list_traces(call: Call[Nothing, TraceChoice]) -> TracesReply:
    """The traces of the last deliveries."""
    request = GetTraces(limit=call.query.limit)
    return TracesReply(traces=await latest_traces(call.storage, request))


async def get_traces(call: Call[Nothing, TraceChoice]) -> TracesReply:
    """The traces of one request."""
    request = GetTraces(request_id=call.names["request_id"], limit=call.query.limit)
    return TracesReply(traces=await latest_traces(call.storage, request))


ROUTES = (
    Route(
        *("GET", "/v1/schedule", "schedule:read", "The schedule in force"),
        *(get_schedule, ScheduleReply),
    ),
    Route(
        *("PATCH", "/v1/schedule", "schedule:write", "Change the schedule", change_schedule),
        *(ScheduleReply, ScheduleChange),
    ),
    Route(
        *("GET", "/v1/deliveries", "schedule:read", "What is delivered now"),
        *(list_deliveries, DeliveriesReply),
    ),
    Route(
        *("GET", "/v1/traces", "traces:read", "The last deliveries", list_traces, TracesReply),
        query=TraceChoice,
    ),
    Route(
        *("GET", "/v1/traces/{request_id}", "traces:read", "Where a request's time went"),
        *(get_traces, TracesReply),
        query=TraceChoice,
    ),
)
