"""A stored body on its way to the client.

Large bodies are handed over: the storage server writes them to the client's own socket, and not a
byte passes through this process. Small ones, where passing a socket costs more than the bytes, and
those of connections that cannot be handed over are read from the storage connection.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.connections import client_socket
from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_schemas.messages.reads import BodySent, SendBody

HANDOVER_BYTES_MIN = 64 << 10  # below it the extra reply of a handover is what costs
BUFFER_BYTES = 256 << 10  # of a streamed body; a local socket gives little more at once


async def send_body(
    exchange: Exchange,
    connection: StorageConnection,
    response: web.StreamResponse,
    offset_bytes: int,
    length_bytes: int,
) -> None:
    """Send a response whose Content-Length is `length_bytes`, at least 1.

    The body is a range of what the storage server has opened. What is raised before the
    response's first byte is an ordinary error; later the connection has to be cut.
    """
    transport = exchange.request.transport
    stall_timeout_s = exchange.settings.gateway.body_stall_timeout_s
    with client_socket.SendWatch(transport, stall_timeout_s):
        if await _hand_over(exchange, connection, response, offset_bytes, length_bytes):
            exchange.sent_bytes = length_bytes
        else:
            await connection.ask_for_body(offset_bytes, length_bytes)
            await _stream(exchange, connection, response, length_bytes)


async def _hand_over(
    exchange: Exchange,
    connection: StorageConnection,
    response: web.StreamResponse,
    offset_bytes: int,
    length_bytes: int,
) -> bool:
    """Have the storage server write the body; false where that is not possible."""
    transport = exchange.request.transport
    may = exchange.settings.gateway.body_handover and connection.passes_descriptors
    wanted = may and length_bytes > HANDOVER_BYTES_MIN
    if not wanted or transport is None:
        return False
    await exchange.start(response)
    if not await _is_flushed(exchange.request.writer, transport):
        return False
    descriptor = client_socket.duplicate(transport)
    if descriptor is None:
        return False
    storage = exchange.settings.storage
    choice = SendBody(offset_bytes=offset_bytes, length_bytes=length_bytes, into_socket=True)
    try:
        await connection.send(choice, descriptor=descriptor)
    finally:
        os.close(descriptor)
    await connection.receive(
        BodySent,
        timeout_s=storage.delivery_timeout_s + exchange.settings.gateway.storage_timeout_s,
    )
    return True


async def _is_flushed(writer: AbstractStreamWriter, transport: asyncio.Transport) -> bool:
    """Wait until the head has left; the write buffer's limit is 0, so draining means empty."""
    await writer.drain()
    return transport.get_write_buffer_size() == 0


async def _stream(
    exchange: Exchange,
    connection: StorageConnection,
    response: web.StreamResponse,
    length_bytes: int,
) -> None:
    """Pass the body on. The response begins with the first bytes, so that an object that cannot
    be read is still an error with a status.
    """
    writer = exchange.request.writer
    buffer = memoryview(bytearray(min(length_bytes, BUFFER_BYTES)))
    if length_bytes > BUFFER_BYTES and exchange.request.transport is not None:
        client_socket.bound_unsent(exchange.request.transport)
    async with aclosing(connection.receive_body(length_bytes, buffer)) as pieces:
        async for piece in pieces:
            if exchange.response is None:
                await exchange.start(response)
            await writer.write(piece)
            await writer.drain()  # until nothing holds the buffer any more
            exchange.sent_bytes += len(piece)
