"""The processes: health, draining, and what they log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.admin.serving.storage_servers import (
    ask_each,
    name_of,
    named_server,
    process_of,
)
from objectcache_gateway.storage.known_server import KnownServer
from objectcache_gateway.storage.storage_fleet import StorageFleet
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
    answers = await _healths(call.storage)
    storage = [_state_of(process, answer) for process, answer in answers.items()]
    processes = (own, *storage, *gateways)
    healths = [one for one in answers.values() if isinstance(one, Health)]
    if not healths:
        return HealthReply(
            status="unavailable", processes=processes, audit_lines_lost=audit_lines_lost
        )
    is_degraded = any(one.degraded for one in (*storage, *gateways))
    return HealthReply(
        status=_status_of(healths, is_degraded=is_degraded or len(healths) < len(answers)),
        processes=processes,
        engine=healths[0].engine,
        draining=all(one.draining for one in healths),
        deliveries_in_flight=sum(one.deliveries_in_flight for one in healths),
        in_flight_bytes=sum(one.in_flight_bytes for one in healths),
        damaged_count=sum(one.damaged_count for one in healths),
        flush_failure=next((one.flush_failure for one in healths if one.flush_failure), ""),
        audit_lines_lost=audit_lines_lost,
    )


async def _healths(storage: StorageFleet) -> dict[str, Health | ObjectCacheError]:
    """How every storage server answers, by the process' name."""
    if storage.has_several:
        answers = await ask_each(storage, GetHealth(), Health)
        return {process_of(storage, server): answer for server, answer in answers.items()}
    try:
        return {STORAGE: await storage.call(GetHealth(), Health)}
    except ObjectCacheError as error:
        return {STORAGE: error}


def _state_of(process: str, answer: Health | ObjectCacheError) -> ProcessState:
    if isinstance(answer, ObjectCacheError):
        return ProcessState(process=process, ok=False, message=answer.message)
    told = "; ".join(filter(None, ("draining" if answer.draining else "", answer.degraded)))
    return ProcessState(process=process, ok=True, degraded=bool(answer.degraded), message=told)


def _status_of(
    healths: Sequence[Health], *, is_degraded: bool
) -> Literal["ok", "degraded", "draining", "read_only"]:
    """One of several servers that drains, or does not answer, takes nothing from the others."""
    if all(one.draining for one in healths):
        return "draining"
    if any(one.flush_failure for one in healths):
        return "read_only"
    return "degraded" if is_degraded else "ok"


async def change_drain(call: Call[DrainChange, Nothing]) -> HealthReply:
    """Take no deliveries, bodies and changes, or take them again; those in flight finish.

    Gateways serve on; where no server takes work their health check says 503, so that a balancer
    takes them away. Raises `InvalidRequest` for the last of several that takes work, unless `last`.
    """
    server = named_server(call.storage, call.body.server)
    if call.body.draining and call.storage.has_several and not call.body.last:
        await check_not_last(call.storage, server)
    await server.pool.call(Drain(draining=call.body.draining), Done)
    return await get_health(call)


async def check_not_last(storage: StorageFleet, server: KnownServer) -> None:
    """Raises `InvalidRequest` where no other server takes work and can reach its store."""
    answers = await ask_each(storage, GetHealth(), Health)
    for other, answer in answers.items():
        is_cut_off = other.state is not None and bool(other.state.store_failure)
        takes_work = isinstance(answer, Health) and not answer.draining and not is_cut_off
        if other is not server and takes_work:
            return
    raise InvalidRequest(
        f"{name_of(server)} is the last storage server that takes work, and all would be refused: "
        "undrain another one, or say last (--last) to drain it all the same"
    )


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
        answers = await ask_each(call.storage, SetLogLevel(level=level), Done)
        states += [
            _told(process_of(call.storage, server), answer) for server, answer in answers.items()
        ]
    named = tuple(name for name in gateways.names if asked in (ALL, name))
    states += _states(await gateways.put(GATEWAY_LOG_LEVEL_PATH, {"level": level}, named))
    return ProcessesReply(processes=tuple(states))


def _told(process: str, answer: Done | ObjectCacheError) -> ProcessState:
    message = answer.message if isinstance(answer, ObjectCacheError) else ""
    return ProcessState(process=process, ok=not message, message=message)


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
