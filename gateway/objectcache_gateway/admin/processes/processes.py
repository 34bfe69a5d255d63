"""The processes: health, draining, and what they log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.storage.storage_connection import StoragePool
from objectcache_runtime.logs import set_log_level
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.operators.admin_api import (
    DrainChange,
    HealthReply,
    Liveness,
    LogLevel,
    ProcessesReply,
    ProcessState,
)
from objectcache_schemas.operators.server_state import Drain, GetHealth, Health, SetLogLevel

ADMIN, STORAGE, ALL = "admin", "storage", "all"
GATEWAY_STATE_PATH, GATEWAY_LOG_LEVEL_PATH = "/state", "/log-level"


async def get_liveness(call: Call[Nothing, Nothing]) -> Liveness:
    """That this process serves; the one thing that needs no credentials."""
    return Liveness()


async def get_health(call: Call[Any, Nothing]) -> HealthReply:
    """The state of all processes. A gateway that does not answer does not make it ill."""
    gateways = gateway_states(await call.reach.gateways.get(GATEWAY_STATE_PATH))
    own = ProcessState(process=ADMIN, ok=True)
    audit_lines_lost = call.reach.audit_log.lost_lines
    try:
        health = await call.storage.call(GetHealth(), Health)
    except ObjectCacheError as error:
        storage = ProcessState(process=STORAGE, ok=False, message=error.message)
        return HealthReply(
            status="unavailable",
            processes=(own, storage, *gateways),
            audit_lines_lost=audit_lines_lost,
        )
    storage = ProcessState(
        process=STORAGE, ok=True, degraded=bool(health.degraded), message=health.degraded
    )
    is_degraded = any(one.degraded for one in (storage, *gateways))
    return HealthReply(
        status=_status_of(health, is_degraded=is_degraded),
        processes=(own, storage, *gateways),
        engine=health.engine,
        draining=health.draining,
        deliveries_in_flight=health.deliveries_in_flight,
        in_flight_bytes=health.in_flight_bytes,
        damaged_count=health.damaged_count,
        flush_failure=health.flush_failure,
        audit_lines_lost=audit_lines_lost,
    )


def _status_of(
    health: Health, *, is_degraded: bool
) -> Literal["ok", "degraded", "draining", "read_only"]:
    if health.draining:
        return "draining"
    if health.flush_failure:
        return "read_only"
    return "degraded" if is_degraded else "ok"


async def change_drain(call: Call[DrainChange, Nothing]) -> HealthReply:
    """Take no deliveries, bodies and changes, or take them again; those in flight finish.

    Gateways serve on, and their health check says 503, so that a balancer takes them away.
    """
    await call.storage.call(Drain(draining=call.body.draining), Done)
    return await get_health(call)


async def change_log_level(call: Call[LogLevel, Nothing]) -> ProcessesReply:
    """Change what processes log until they end."""
    asked, level = call.body.process, call.body.level
    gateways = call.reach.gateways
    known = (ALL, ADMIN, STORAGE, *gateways.names)
    if asked not in known:
        raise InvalidRequest(f"process {asked!r} is not one of {', '.join(known)}")
    states: list[ProcessState] = []
    if asked in (ALL, ADMIN):
        set_log_level(level)
        states.append(ProcessState(process=ADMIN, ok=True))
    if asked in (ALL, STORAGE):
        states.append(await _set_storage_log_level(call.storage, level))
    named = tuple(name for name in gateways.names if asked in (ALL, name))
    states += _states(await gateways.put(GATEWAY_LOG_LEVEL_PATH, {"level": level}, named))
    return ProcessesReply(processes=tuple(states))


async def _set_storage_log_level(storage: StoragePool, level: str) -> ProcessState:
    try:
        await storage.call(SetLogLevel(level=level), Done)
    except ObjectCacheError as error:
        return ProcessState(process=STORAGE, ok=False, message=error.message)
    return ProcessState(process=STORAGE, ok=True)


class _Crowded(msgspec.Struct, frozen=True):
    """What is read here of a gateway's state."""

    crowded: str = ""


def gateway_states(answers: Mapping[str, bytes | ObjectCacheError]) -> list[ProcessState]:
    """How gateways answered, and whom they turned away lately."""
    states = _states(answers)
    for index, (name, answer) in enumerate(answers.items()):
        if isinstance(answer, bytes):
            crowded = msgspec.json.decode(answer, type=_Crowded).crowded
            if crowded:
                states[index] = ProcessState(process=name, ok=True, degraded=True, message=crowded)
    return states


def _states(answers: Mapping[str, bytes | ObjectCacheError]) -> list[ProcessState]:
    return [
        ProcessState(process=name, ok=False, message=answer.message)
        if isinstance(answer, ObjectCacheError)
        else ProcessState(process=name, ok=True)
        for name, answer in answers.items()
    ]


ROUTES = (
    Route("GET", "/healthz", None, "That the admin API serves", get_liveness, Liveness),
    Route("GET", "/v1/health", "server:read", "All processes", get_health, HealthReply),
    Route(
        *("PUT", "/v1/drain", "server:write", "Take no deliveries, bodies and changes, or again"),
        *(change_drain, HealthReply, DrainChange),
    ),
    Route(
        *("PUT", "/v1/log-level", "server:write", "Change what processes log"),
        *(change_log_level, ProcessesReply, LogLevel),
    ),
)
