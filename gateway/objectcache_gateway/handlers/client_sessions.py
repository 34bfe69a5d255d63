"""Sessions of clients anywhere: a WebSocket here, a connection to the storage server behind it.

The gateway authenticates who asks, and then passes messages on without looking into them. Its pings
find out that a client is gone, or stands still, and as often it looks whether the access key is
still in force; the session's targets end with it otherwise.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from objectcache_gateway.exchange import Exchange
from objectcache_gateway.storage_connection import StorageConnection
from objectcache_schemas import headers
from objectcache_schemas.errors import AccessDenied, InvalidRequest, ObjectCacheError
from objectcache_schemas.messages import JoinForClient
from objectcache_schemas.target_messages import SessionJoined

MESSAGE_BYTES_MAX = 64 << 10  # of a client; what registers memory is the longest


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
        max_msg_size=MESSAGE_BYTES_MAX,
    )
    if not joined.can_prepare(exchange.request).ok:
        raise InvalidRequest(
            "the WebSocket upgrade makes no sense: Sec-WebSocket-Version must be 13, "
            "Sec-WebSocket-Key 16 bytes in base64"
        )
    connection = await exchange.storage.connect()
    try:
        await connection.ask(JoinForClient(identity=exchange.identity), SessionJoined)
        joined.headers.update(exchange.base_headers)
        exchange.leave_flight()
        await exchange.start(joined)
        await _relay(exchange, joined, connection)
    finally:
        connection.close()
    return joined


async def _relay(
    exchange: Exchange, client: web.WebSocketResponse, storage: StorageConnection
) -> None:
    """Pass messages both ways until one side has ended, or the session may not go on."""
    watched = asyncio.ensure_future(_until_revoked(exchange))
    tasks: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(_to_storage(client, storage)),
        asyncio.ensure_future(_to_client(client, storage)),
        watched,
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        storage.close()  # first: a client that stands still would keep its targets meanwhile
        code, reason = WSCloseCode.OK, ""
        if watched.done() and not watched.cancelled():
            code, reason = WSCloseCode.POLICY_VIOLATION, watched.result()
        await client.close(code=code, message=reason.encode())


async def _until_revoked(exchange: Exchange) -> str:
    """Wait until the access key that signed is not in force any more; returns why."""
    while True:
        await asyncio.sleep(exchange.settings.gateway.session_heartbeat_s)
        try:
            exchange.check_identity()
        except AccessDenied as error:
            return error.message


async def _to_storage(client: web.WebSocketResponse, storage: StorageConnection) -> None:
    async for message in client:
        if message.type is not WSMsgType.BINARY:
            return  # nothing of this protocol
        await storage.send_frame(message.data)


async def _to_client(client: web.WebSocketResponse, storage: StorageConnection) -> None:
    try:
        while True:
            await client.send_bytes(await storage.receive_frame())
    except ObjectCacheError:
        return  # the storage server has ended the session, or is gone
