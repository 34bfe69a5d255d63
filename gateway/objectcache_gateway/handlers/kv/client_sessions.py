"""Sessions of clients anywhere: a WebSocket here, a connection to the storage server behind it.

The gateway authenticates who asks, and then passes messages on without looking into them, one a
turn of the loop and storage.session_messages_per_s at most: what a client sends faster is not read.
Its pings
find out that a client is gone, or stands still, and as often it looks whether the access key is
still in force; the session's targets end with it otherwise.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.connections.client_socket import cut, give_up_after, read_little
from objectcache_gateway.handlers.kv.known_servers import wanted_server
from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_gateway.storage.storage_fleet import nobody
from objectcache_runtime.first_of import end, first_done
from objectcache_runtime.shares.message_pace import MessagePace
from objectcache_schemas import headers
from objectcache_schemas.errors import AccessDenied, InvalidRequest, ObjectCacheError
from objectcache_schemas.messages.sessions import JoinForClient, SessionJoined

MESSAGE_BYTES_MAX = 64 << 10  # of a client; what registers memory is the longest
# What is read in one turn is parsed in one turn, and a frame may have as few as 6 bytes.
RECEIVE_BUFFER_BYTES = 32 << 10


async def join_session(exchange: Exchange) -> web.StreamResponse:
    """`GET /?kv-session` as a WebSocket: the caller's session, until either side ends it, or the
    access key that signed is not in force any more.

    Raises `InvalidRequest` where the request is no upgrade, `Busy` where storage.sessions_max are
    open.
    """
    if exchange.request.headers.get("upgrade", "").lower() != "websocket":
        raise InvalidRequest(
            "GET /?kv-session must upgrade to a WebSocket; POST /?kv-session asks for a ticket to "
            "the socket on the storage server's host"
        )
    joined = web.WebSocketResponse(
        protocols=(headers.SESSION_PROTOCOL,),
        heartbeat=exchange.settings.gateway.session_heartbeat_s,
        autoping=False,  # pings count as messages
        autoclose=False,  # by `_relay`: the library would end this handler with the connection
        compress=False,
        max_msg_size=MESSAGE_BYTES_MAX + 1,  # the library refuses what has as many
    )
    if not joined.can_prepare(exchange.request).ok:
        raise InvalidRequest(
            "the WebSocket upgrade makes no sense: Sec-WebSocket-Version must be 13, "
            "Sec-WebSocket-Key 16 bytes in base64"
        )
    join = JoinForClient(identity=exchange.identity, access_key=exchange.authenticated.access_key)
    prefer = wanted_server(exchange, nobody)
    connection = await exchange.storage.connect_with(join, SessionJoined, prefer)
    try:
        joined.headers.update(exchange.base_headers)
        exchange.leave_flight()
        await exchange.start(joined)
        if exchange.request.transport is not None:
            read_little(exchange.request.transport, RECEIVE_BUFFER_BYTES)
            give_up_after(exchange.request.transport, exchange.settings.gateway.session_heartbeat_s)
        await _relay(exchange, joined, connection)
    finally:
        connection.close()
    return joined


async def _relay(
    exchange: Exchange, client: web.WebSocketResponse, storage: StorageConnection
) -> None:
    """Pass messages both ways until one side has ended, or the session may not go on, or the client
    has taken nothing of what it was sent for gateway.session_heartbeat_s.
    """
    stall_timeout_s = exchange.settings.gateway.session_heartbeat_s
    watched = asyncio.ensure_future(_until_revoked(exchange))
    pace = MessagePace(
        exchange.settings.storage.session_messages_per_s, asyncio.get_running_loop().time()
    )
    tasks: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(_to_storage(client, storage, pace, stall_timeout_s)),
        asyncio.ensure_future(_to_client(client, storage, stall_timeout_s)),
        watched,
    ]
    try:
        await first_done(*tasks)
    finally:
        await end(*tasks)
        storage.close()  # first: a client that stands still would keep its targets meanwhile
        code, reason = WSCloseCode.OK, ""
        if watched.done() and not watched.cancelled():
            code, reason = WSCloseCode.POLICY_VIOLATION, watched.result()
        transport = exchange.request.transport
        try:
            async with asyncio.timeout(stall_timeout_s):
                await client.close(code=code, message=reason.encode())
        except TimeoutError:
            if transport is not None:
                cut(transport)


async def _until_revoked(exchange: Exchange) -> str:
    """Wait until the access key that signed is not in force any more; returns why."""
    while True:
        await asyncio.sleep(exchange.settings.gateway.session_heartbeat_s)
        try:
            exchange.check_identity()
        except AccessDenied as error:
            return error.message


async def _to_storage(
    client: web.WebSocketResponse,
    storage: StorageConnection,
    pace: MessagePace,
    stall_timeout_s: float,
) -> None:
    now_s = asyncio.get_running_loop().time
    async for message in client:
        match message.type:
            case WSMsgType.BINARY:
                await storage.send_frame(message.data)
            case WSMsgType.PING:
                async with asyncio.timeout(stall_timeout_s):
                    await client.pong(message.data)
            case WSMsgType.PONG:
                pass
            case _:
                return  # nothing of this protocol
        await asyncio.sleep(pace.count(now_s()))


async def _to_client(
    client: web.WebSocketResponse, storage: StorageConnection, stall_timeout_s: float
) -> None:
    try:
        while True:
            frame = await storage.receive_frame()
            async with asyncio.timeout(stall_timeout_s):
                await client.send_bytes(frame)
    except ObjectCacheError:
        return  # the storage server has ended the session, or is gone
