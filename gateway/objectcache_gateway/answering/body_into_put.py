"""A request's body on its way into a put."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from objectcache_gateway.answering.http_exchange import Exchange, feed
from objectcache_gateway.bodies.body import BodyDecoder, BodyResult
from objectcache_gateway.storage.storage_connection import StorageConnection
from objectcache_schemas.errors import AccessDenied, InvalidRequest, ObjectCacheError
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.writes import AbortPut

SMALL_BYTES_MAX = 64 << 10  # of a body that is received whole before a put begins


def is_small(decoder: BodyDecoder) -> bool:
    """Whether a body is received whole before the storage server is asked to make room for it, so
    that one which arrives slowly keeps no room from others.
    """
    size_bytes = decoder.expected_bytes
    return size_bytes is not None and size_bytes <= SMALL_BYTES_MAX


@dataclass(frozen=True, slots=True)
class BegunBody:
    """A body of which the first SMALL_BYTES_MAX, or all, have arrived."""

    first: Sequence[bytes | memoryview]
    rest: AsyncIterator[bytes]


async def begin_body(exchange: Exchange, decoder: BodyDecoder) -> BegunBody:
    """Receive the first of a body, so that a client which sends a few bytes and stands still holds
    nothing of the storage server. Raises what is wrong with it.
    """
    arriving = exchange.pieces()
    first: list[bytes | memoryview] = []
    received_bytes = 0
    async for data in arriving:
        first += await feed(decoder, data)
        received_bytes += len(data)
        if received_bytes >= SMALL_BYTES_MAX:
            break
    return BegunBody(first, arriving)


async def receive_into_put(
    decoder: BodyDecoder, body: BegunBody, connection: StorageConnection
) -> BodyResult:
    """Pass the body on to a put that asked for data, and return what it was.

    A body that is not right aborts the put and raises what was wrong with it.
    """
    try:
        if body.first:
            await connection.send_data(body.first)
        async for data in body.rest:
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
    payload = await _gathered(exchange, decoder)
    return payload, decoder.finish()


async def put_whole(connection: StorageConnection, pieces: Sequence[bytes | memoryview]) -> None:
    """Pass a body that is at hand on to a put that asked for data."""
    if pieces:
        await connection.send_data(pieces)
    await connection.end_data()


async def decoded(
    exchange: Exchange, decoder: BodyDecoder
) -> AsyncIterator[Sequence[bytes | memoryview]]:
    """The body as it arrives, decoded; a small one in one piece, once all of it is there, and of a
    larger one the first SMALL_BYTES_MAX together.
    """
    if is_small(decoder):
        yield [await _gathered(exchange, decoder)]
        return
    body = await begin_body(exchange, decoder)
    yield body.first
    async for data in body.rest:
        yield await feed(decoder, data)


async def _gathered(exchange: Exchange, decoder: BodyDecoder) -> bytes:
    payload = bytearray()
    async for data in exchange.pieces():
        for piece in await feed(decoder, data):
            payload += piece
    return bytes(payload)


async def abort_put(connection: StorageConnection) -> None:
    """End the data and forget the put. A connection that cannot is closed by its owner."""
    with contextlib.suppress(ObjectCacheError):
        await connection.end_data()
        await connection.ask(AbortPut(), Done)
