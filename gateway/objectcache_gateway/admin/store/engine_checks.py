"""The engine: its state, checks of the store, and checkpoints."""

from __future__ import annotations

import contextlib

import msgspec
from aiohttp import web

from objectcache_gateway.admin.serving.media_types import NDJSON
from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.messages.message import Message
from objectcache_schemas.operators.admin_api import (
    CHECKPOINT_TIMEOUT_S,
    CheckChoice,
    CheckLine,
    CheckpointView,
    Problem,
)
from objectcache_schemas.operators.engine_status import (
    CheckEnded,
    CheckEngine,
    CheckpointTaken,
    CheckProgress,
    EngineState,
    EngineStatus,
    GetEngineStatus,
    TakeCheckpoint,
)


async def get_engine(call: Call[Nothing, Nothing]) -> EngineStatus:
    """The engine's state."""
    return (await call.storage.call(GetEngineStatus(), EngineState)).status


async def take_checkpoint(call: Call[Nothing, Nothing]) -> CheckpointView:
    """Take a checkpoint of a shared store's index, at one of its servers."""
    connection = await call.storage.connect()
    try:
        taken = await connection.ask(
            TakeCheckpoint(), CheckpointTaken, timeout_s=CHECKPOINT_TIMEOUT_S
        )
    finally:
        connection.close()
    return CheckpointView(number=taken.number, size_bytes=taken.size_bytes, taken_s=taken.taken_s)


async def check(call: Call[CheckChoice, Nothing]) -> web.StreamResponse:
    """Check the store; a line of JSON for each step. The client's leaving ends the check.

    What is refused before the first step is an ordinary error.
    """
    connection = await call.storage.connect()
    try:
        await connection.send(CheckEngine(repair=call.body.repair))
        first = await connection.receive(Message)
        response = web.StreamResponse(headers={"Content-Type": NDJSON})
        await response.prepare(call.request)
        with contextlib.suppress(ConnectionError):
            await _stream(connection, first, response)
        return response
    finally:
        connection.close()  # which ends a check that still runs


async def _stream(
    connection: StorageConnection, message: Message, response: web.StreamResponse
) -> None:
    while True:
        await response.write(_line(check_line(message)))
        if not isinstance(message, CheckProgress):
            break
        try:
            message = await connection.receive(Message)
        except ObjectCacheError as error:
            problem = Problem(code=error.code, message=error.message)
            await response.write(_line(CheckLine(ended=True, problem=problem)))
            break
    await response.write_eof()


def check_line(message: Message) -> CheckLine:
    """What a step of a check says."""
    if isinstance(message, CheckProgress | CheckEnded):
        return CheckLine(report=message.report, ended=isinstance(message, CheckEnded))
    problem = Problem(code="InternalError", message="the storage server answered no check")
    return CheckLine(ended=True, problem=problem)


def _line(line: CheckLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


ROUTES = (
    Route("GET", "/v1/engine", "engine:read", "The engine's state", get_engine, EngineStatus),
    Route(
        *("POST", "/v1/checks", "engine:write", "Check the store, a line for each step", check),
        *(CheckLine, CheckChoice),
        content_type=NDJSON,
    ),
    Route(
        *("POST", "/v1/checkpoints", "engine:write", "Take a checkpoint of a shared store"),
        *(take_checkpoint, CheckpointView),
    ),
)
