"""A request's body on its way into a put."""

from __future__ import annotations

import contextlib

from objectcache_gateway.bodies.body import BodyDecoder, BodyResult
from objectcache_gateway.exchange import Exchange, feed
from objectcache_gateway.storage_connection import StorageConnection
from objectcache_schemas.errors import AccessDenied, InvalidRequest, ObjectCacheError
from objectcache_schemas.messages import AbortPut, Done


async def receive_into_put(
    exchange: Exchange, decoder: BodyDecoder, connection: StorageConnection
) -> BodyResult:
    """Pass the body on to a put that asked for data, and return what it was.

    A body that is not right aborts the put and raises what was wrong with it.
    """
    try:
        async for data in exchange.pieces():
            pieces = await feed(decoder, data)
            if pieces:
                await connection.send_data(pieces)
        result = decoder.finish()
    except (InvalidRequest, AccessDenied):
        await abort_put(connection)
        raise
    await connection.end_data()
    return result


async def receive_whole(exchange: Exchange, decoder: BodyDecoder) -> tuple[bytes, BodyResult]:
    """A small body, and what it was. Raises what is wrong with it."""
    payload = bytearray()
    async for data in exchange.pieces():
        for piece in await feed(decoder, data):
            payload += piece
    return bytes(payload), decoder.finish()


async def abort_put(connection: StorageConnection) -> None:
    """End the data and forget the put. A connection that cannot is closed by its owner."""
    with contextlib.suppress(ObjectCacheError):
        await connection.end_data()
        await connection.ask(AbortPut(), Done)
