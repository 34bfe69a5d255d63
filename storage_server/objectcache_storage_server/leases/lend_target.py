"""The storage server's side of the Buffer path (paper, section 4.1).

The gateway writes one payload into a client's target itself. It leases the target here, is handed
the target's memory file, and says when it has written; the client hears of it from here, as of any
delivery. The lease keeps the target's memory from being released, so it ends only when the gateway
has said that it writes no more, or has hung up, which says the same.

Memory that a fabric reaches cannot be lent: there the gateway sends the payload back, on the
connection of the lease, and it is written from here (`fill_fabric_target`).
"""

from __future__ import annotations

import asyncio

import msgspec

from objectcache_runtime.first_of import ended_after, first_done
from objectcache_schemas.descriptor import MemoryTarget
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError, WireError
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.leases import LeaseTarget, TargetLeased
from objectcache_schemas.messages.sessions import DeliveryFailure, LayersReady
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.leases.fill_fabric_target import serve_fabric_lease
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
