"""The storage server's side of the Buffer path into memory that a fabric reaches.

The gateway, in whose memory the payload is staged, sends it back in data frames on the lease's
connection, and it is written into the client's memory by way of staging memory. So its bytes cross
between the two processes twice: that is what the path is compared for.
"""

from __future__ import annotations

import asyncio

from objectcache_fabrics.staged_moves import StagedMoves
from objectcache_runtime.first_of import ended_after, first_done
from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import (
    DeliveryFailed,
    InvalidRequest,
    ObjectCacheError,
    WireError,
)
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.leases import LeaseTarget, TargetLeased
from objectcache_schemas.messages.sessions import DeliveryFailure
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.deliveries.get_means import GetMeans


async def serve_fabric_lease(
    means: GetMeans, talk: Conversation, request: LeaseTarget, target: MemoryTarget
) -> None:
    """`LeaseTarget`, to the end of the lease; nothing moves any more when it returns or raises."""
    reserved = await means.gates.staging_memory(request.identity, request.payload_bytes, talk.gone)
    try:
        lease = means.targets.lease(request.identity, target, request.payload_bytes)
    except BaseException:
        reserved.release()
        raise
    session = lease.target.owner
    moves = StagedMoves(lease, means.staging, reserved, session.end)
    failure: WireError | None = DeliveryFailed("the gateway is gone").to_wire()
    try:
        await talk.send(TargetLeased())
        failure = await _fill(means, talk, moves)
        if failure is None:
            moves.announce(request.tag, request.end_layer)
    except ObjectCacheError as error:
        failure = error.to_wire()
        talk.give_up()  # the gateway may still be sending
        raise
    finally:
        moves.close()
        await moves.quiet()
        if failure is not None:  # the client may use its memory again when it hears of it
            session.post(
                DeliveryFailure(tag=request.tag, failed_layer=request.first_layer, error=failure)
            )
    await talk.send(Done())


async def _fill(means: GetMeans, talk: Conversation, moves: StagedMoves) -> WireError | None:
    """Take and write the payload; returns why the gateway says that it failed, None where it did
    not. Raises what ends the lease early.
    """
    filling = asyncio.ensure_future(_take_payload(talk, moves))
    failing = asyncio.ensure_future(moves.until(lambda: False))
    timeout_s = means.settings.storage.delivery_timeout_s
    async with ended_after(filling, failing):
        await first_done(filling, failing, timeout_s=timeout_s)
        for ended in (failing, filling):
            if ended.done():
                return ended.result()
        raise DeliveryFailed(f"it took over {timeout_s:g} s (storage.delivery_timeout_s)")


async def _take_payload(talk: Conversation, moves: StagedMoves) -> WireError | None:
    received_bytes = await _receive_frames(talk, moves)
    end = await talk.receive_lease_end()
    if end.error is None and received_bytes < moves.length_bytes:
        raise InvalidRequest(
            f"the payload ended after {received_bytes} of {moves.length_bytes} bytes",
            code="IncompleteBody",
        )
    await moves.written()
    return end.error


async def _receive_frames(talk: Conversation, moves: StagedMoves) -> int:
    """Write data frames until the empty one; returns their bytes."""
    received_bytes = 0
    while (frame_bytes := await talk.stream.receive_length()) > 0:
        if received_bytes + frame_bytes > moves.length_bytes:
            raise InvalidRequest(f"the payload is over {moves.length_bytes} bytes")
        while frame_bytes:
            await moves.until(lambda: moves.has_room)
            piece = moves.take(min(frame_bytes, moves.buffer_bytes))
            await talk.stream.receive_into(piece)
            moves.write(received_bytes, piece)
            received_bytes += len(piece)
            frame_bytes -= len(piece)
    return received_bytes
