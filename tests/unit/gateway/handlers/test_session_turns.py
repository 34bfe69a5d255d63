"""A client that floods its session: a turn of the loop takes one message of it, no more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from aiohttp import WSMessage, WSMsgType, web

from objectcache_gateway.handlers.kv import client_sessions
from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_runtime.settings import StorageSettings
from objectcache_runtime.shares.message_pace import MessagePace
from objectcache_schemas.errors import WireError
from objectcache_schemas.messages.frames import encode_frame
from objectcache_schemas.messages.message import PROTOCOL_VERSION, Message
from objectcache_schemas.messages.sessions import (
    JoinSession,
    LayersConsumed,
    ReleaseTarget,
    ReturnCredits,
    SessionJoined,
)
from objectcache_storage_server.conversations import sessions
from tests.unit.storage_server.conversations.test_target_sessions import joined

TURNS = 50
FLOOD = 10_000  # messages at hand; one reader that never yields takes all of them
FAST = 1e9  # a second: no pause


class Flooder:
    """A WebSocket that always has a message, and a storage server that takes each at once."""

    def __init__(self, kind: WSMsgType) -> None:
        self._message = WSMessage(kind, b"x", None)
        self.taken = self.sent = self.pongs = 0

    def __aiter__(self) -> Flooder:
        return self

    async def __anext__(self) -> WSMessage:
        if self.taken == FLOOD:
            raise StopAsyncIteration
        self.taken += 1
        return self._message

    async def pong(self, _message: bytes) -> None:
        self.pongs += 1

    async def send_frame(self, _data: bytes) -> None:
        self.sent += 1

    def relay(self, pace: MessagePace) -> asyncio.Task[None]:
        client, storage = cast(web.WebSocketResponse, self), cast(StorageConnection, self)
        return asyncio.create_task(client_sessions._to_storage(client, storage, pace, 20.0))


async def end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [WSMsgType.BINARY, WSMsgType.PING, WSMsgType.PONG])
async def test_a_gateway_takes_one_message_a_turn(kind: WSMsgType) -> None:
    flooder = Flooder(kind)
    relaying = flooder.relay(MessagePace(FAST, 0.0))
    await turns()
    assert 0 < flooder.taken <= TURNS
    assert flooder.sent == (flooder.taken if kind is WSMsgType.BINARY else 0)
    assert flooder.pongs == (flooder.taken if kind is WSMsgType.PING else 0)
    await end(relaying)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [WSMsgType.BINARY, WSMsgType.PING])
async def test_a_gateway_reads_no_more_of_a_client_over_its_rate(kind: WSMsgType) -> None:
    flooder = Flooder(kind)
    pace = MessagePace(1e-6, asyncio.get_running_loop().time())  # one message, then none for days
    relaying = flooder.relay(pace)
    await turns()
    assert flooder.taken == 1
    await end(relaying)


@pytest.mark.asyncio
async def test_what_is_no_message_of_the_protocol_ends_the_relay() -> None:
    flooder = Flooder(WSMsgType.TEXT)
    await flooder.relay(MessagePace(FAST, 0.0))
    assert (flooder.taken, flooder.sent) == (1, 0)


async def count_in_turns(
    monkeypatch: pytest.MonkeyPatch, message: Message, settings: StorageSettings
) -> int:
    """Messages of a flood on the target socket that are read within some turns of the loop."""
    taken = 0
    receive: Callable[..., Any] = sessions._receive

    async def counting(socket: Any) -> Any:
        nonlocal taken
        request = await receive(socket)
        taken += 1
        return request

    async with joined(settings) as client:
        assert isinstance(await asyncio.to_thread(client.event), SessionJoined)
        monkeypatch.setattr(sessions, "_receive", counting)
        client.client.sendall(encode_frame(message) * 500)
        await turns()
        client.serving.cancel()  # it would read on, at its rate
        return taken


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "message",
    [
        LayersConsumed(tag=1, end_layer=1, compute_s=0.1),
        ReleaseTarget(target_id=b"0123456789abcdef"),
        ReturnCredits(count=1),
        JoinSession(v=PROTOCOL_VERSION, ticket=b"x"),
    ],
)
async def test_the_storage_server_takes_one_message_a_turn(
    monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    settings = StorageSettings(sessions_max=1, session_messages_per_s=1_000_000)
    assert 0 < await count_in_turns(monkeypatch, message, settings) <= TURNS


@pytest.mark.asyncio
async def test_the_storage_server_reads_no_more_of_a_client_over_its_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """storage.session_messages_per_s; a burst is twice as many."""
    settings = StorageSettings(sessions_max=1, session_messages_per_s=1)
    message = LayersConsumed(tag=1, end_layer=1, compute_s=0.1)
    assert await count_in_turns(monkeypatch, message, settings) < TURNS // 5


@pytest.mark.asyncio
async def test_an_error_repeats_little_of_a_message_that_is_none() -> None:
    async with joined(StorageSettings(sessions_max=1)) as client:
        await asyncio.to_thread(client.event)
        client.client.sendall(encode_frame(WireError("x" * 60_000, "")))
        error = await asyncio.to_thread(client.event)
        assert isinstance(error, WireError)
        assert len(error.message) < 400
