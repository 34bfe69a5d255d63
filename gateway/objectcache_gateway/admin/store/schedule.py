"""The schedule, the deliveries under way, and the traces of those before."""

from __future__ import annotations

import msgspec

from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_schemas.messages.quotas import GetUsage, Usage
from objectcache_schemas.operators.admin_api import (
    DeliveriesReply,
    ScheduleChange,
    ScheduleReply,
    TraceChoice,
    TracesReply,
)
from objectcache_schemas.operators.schedule import GetSchedule, ScheduleState, SetSchedule
from objectcache_schemas.operators.traces import GetTraces, Traces


def schedule_reply(state: ScheduleState) -> ScheduleReply:
    """A schedule as the API says it."""
    return ScheduleReply(**msgspec.structs.asdict(state))


async def get_schedule(call: Call[Nothing, Nothing]) -> ScheduleReply:
    """The schedule."""
    return schedule_reply(await call.storage.call(GetSchedule(), ScheduleState))


async def change_schedule(call: Call[ScheduleChange, Nothing]) -> ScheduleReply:
    """Change the schedule, and keep the change."""
    request = SetSchedule(changes=call.body.changes, reset=call.body.reset)
    return schedule_reply(await call.storage.call(request, ScheduleState))


async def list_deliveries(call: Call[Nothing, Nothing]) -> DeliveriesReply:
    """What is delivered now, and for whom."""
    state = await call.storage.call(GetSchedule(), ScheduleState)
    usage = await call.storage.call(GetUsage(), Usage)
    return DeliveriesReply(
        at_s=call.now_s,
        deliveries=state.deliveries,
        delivery_count=state.delivery_count,
        waiting=state.waiting,
        rate_bytes_per_s=state.rate_bytes_per_s,
        tenants=usage.tenants,
    )


async def list_traces(call: Call[Nothing, TraceChoice]) -> TracesReply:
    """The traces of the last deliveries."""
    found = await call.storage.call(GetTraces(limit=call.query.limit), Traces)
    return TracesReply(traces=found.traces)


async def get_traces(call: Call[Nothing, TraceChoice]) -> TracesReply:
    """The traces of one request."""
    request = GetTraces(request_id=call.names["request_id"], limit=call.query.limit)
    return TracesReply(traces=(await call.storage.call(request, Traces)).traces)


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
