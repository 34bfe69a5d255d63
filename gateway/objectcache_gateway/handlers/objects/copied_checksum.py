"""The checksum that a copy is asked to carry and its source does not have."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.bodies.checksums import Checksum, algorithm_named
from objectcache_gateway.request.request_head import RequestHead
from objectcache_schemas.errors import PreconditionFailed
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.reads import CloseObject, ObjectOpened, OpenObject
from objectcache_schemas.messages.writes import CopyObject
from objectcache_schemas.records import FULL_OBJECT, ObjectAttributes

BUFFER_BYTES = 1 << 20
THREAD_BYTES_MIN = 64 << 10  # smaller pieces are hashed sooner than a thread takes them over


def missing_algorithm(head: RequestHead, attributes: ObjectAttributes) -> str | None:
    """The algorithm of x-amz-checksum-algorithm where the copy's `attributes` have no value of it.

    Raises `InvalidRequest` for a name that is none.
    """
    named = head.header("x-amz-checksum-algorithm")
    algorithm = algorithm_named(named) if named is not None else None
    return None if algorithm in attributes.checksums else algorithm


async def with_checksum(exchange: Exchange, request: CopyObject, algorithm: str) -> CopyObject:
    """The request with the checksum of the source's bytes, which are read once for it.

    Raises `PreconditionFailed` where the source has changed.
    """
    opening = OpenObject(
        bucket=request.source_bucket,
        key=request.source_key,
        identity=exchange.identity,
        request_id=exchange.request_id,
    )
    checksum = Checksum(algorithm)
    async with exchange.storage.conversation() as conversation:
        timeout_s = exchange.admission_timeout_s
        info = (await conversation.begin(opening, ObjectOpened, timeout_s=timeout_s)).info
        connection = conversation.connection
        if info.etag != request.source_etag or not info.size_bytes:
            await connection.ask(CloseObject(), Done)
        if info.etag != request.source_etag:
            raise PreconditionFailed(f"{info.key!r} was overwritten while it was copied")
        if info.size_bytes:
            await connection.ask_for_body(0, info.size_bytes)
            buffer = memoryview(bytearray(min(info.size_bytes, BUFFER_BYTES)))
            async with aclosing(connection.receive_body(info.size_bytes, buffer)) as pieces:
                async for piece in pieces:
                    await _update(checksum, piece)
    return _carrying(request, checksum)


async def _update(checksum: Checksum, piece: memoryview) -> None:
    if len(piece) < THREAD_BYTES_MIN:
        checksum.update(piece)
    else:
        await asyncio.to_thread(checksum.update, piece)


def _carrying(request: CopyObject, checksum: Checksum) -> CopyObject:
    attributes = msgspec.structs.replace(
        request.attributes,
        checksums={checksum.algorithm: checksum.value()},
        checksum_type=FULL_OBJECT,
    )
    return msgspec.structs.replace(request, attributes=attributes)
