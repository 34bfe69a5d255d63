"""The storage server's side of the Buffer path (paper, section 4.1).

The gateway writes one payload into a client's target itself. It leases the target here, is handed
the target's memory file, and says when it has written; the client hears of it from here, as of any
delivery. The lease keeps the target's memory from being released, so it ends only when the gateway
has said that it writes no more, or has hung up, which says the same.

Memory that a fabric reaches cannot be lent: there the gateway sends the payload back, on the
connection of the lease, and it is written from here by way of staging memory. So its bytes cross
between the two processes twice: that is what the path is compared for.
"""

from __future__ import annotations

import asyncio

import msgspec

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
from objectcache_schemas.messages.sessions import DeliveryFailure, LayersReady
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.transports.fabrics import FABRICS, check_transport
from objectcache_storage_server.transports.targets import Lease


async def serve_lease(means: GetMeans, talk: Conversation, request: LeaseTarget) -> None:
    """`LeaseTarget`, to the end of the lease.

    Raises `Unsupported` for a transport that there is none of, `InvalidRequest` where the payload
    would leave the target's bounds, `NotFound` (NoSuchTarget) unless the identity registered it.
    """
    target = _asked_target(request)
    if request.transport in FABRICS:
        await serve_fabric_lease(means, talk, request, target)
    else:
        await _serve_mapped(means, talk, request, target)


async def _serve_mapped(
    means: GetMeans, talk: Conversation, request: LeaseTarget, target: MemoryTarget
) -> None:
    lease = means.targets.lease(request.identity, target, request.payload_bytes)
    session = lease.target.owner
    failure: WireError | None = DeliveryFailed("the gateway is gone").to_wire()
    try:
        failure = await _hold(means, talk, lease)
    finally:
        session.post(_event(request, failure))
        lease.end()
    if not talk.given_up:
        await talk.send(Done())


def _asked_target(request: LeaseTarget) -> MemoryTarget:
    check_transport(request.transport)
    return MemoryTarget(
        transport=request.transport,
        target_id=request.target_id,
        offset_bytes=request.offset_bytes,
        length_bytes=request.length_bytes,
        tag=request.tag,
    )


async def _hold(means: GetMeans, talk: Conversation, lease: Lease) -> WireError | None:
    """Wait until the gateway writes no more; returns why it failed, None where it did not.

    A lease that has to end early is told to the gateway, and is held on until it has answered.
    Raises `ConnectionEnded` where the gateway hung up of itself.
    """
    stopped = _Stop()
    lease.on_release(stopped.set)
    await talk.stream.send_frame_with(TargetLeased(), lease.target.mapped.descriptor)
    ending = asyncio.ensure_future(talk.receive_lease_end())
    waiting = asyncio.ensure_future(stopped.event.wait())
    timeout_s = means.settings.storage.delivery_timeout_s
    async with ended_after(ending, waiting):
        await first_done(ending, waiting, timeout_s=timeout_s)
        if ending.done():
            return (await ending).error
        why = stopped.error or DeliveryFailed(
            f"it took over {timeout_s:g} s (storage.delivery_timeout_s)"
        )
        talk.give_up()
        await talk.send(why.to_wire())
        await asyncio.wait({ending})
        return why.to_wire()


class _Stop:
    """Why a lease has to end early, set from any thread."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.error: ObjectCacheError | None = None
        self._loop = asyncio.get_running_loop()

    def set(self, error: ObjectCacheError) -> None:
        """Have the lease end."""
        self.error = error
        self._loop.call_soon_threadsafe(self.event.set)


def _event(request: LeaseTarget, failure: WireError | None) -> msgspec.Struct:
    if failure is None:
        return LayersReady(tag=request.tag, end_layer=request.end_layer)
    return DeliveryFailure(tag=request.tag, failed_layer=request.first_layer, error=failure)


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
