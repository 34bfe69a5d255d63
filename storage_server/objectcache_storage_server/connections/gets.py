"""Conversations that send bytes: an opened object, or a delivery of a prefix."""

from __future__ import annotations

import asyncio
import logging
import socket as sockets
from collections.abc import Sequence
from dataclasses import dataclass

from objectcache_schemas.descriptor import Descriptor, MemoryTarget, OnMissing
from objectcache_schemas.errors import (
    DeliveryFailed,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unsupported,
)
from objectcache_schemas.messages import (
    BodySent,
    DeliveryAccepted,
    DeliveryEnded,
    Done,
    KvGet,
    ObjectInfo,
    ObjectOpened,
    OpenObject,
    SendBody,
)
from objectcache_storage_server.connections.conversation import Conversation
from objectcache_storage_server.connections.sessions import Session
from objectcache_storage_server.connections.sockets import StreamSocket
from objectcache_storage_server.deliver import Delivery, DeliveryState
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.mode import choose_mode
from objectcache_storage_server.plan import (
    ChunkPlan,
    Plan,
    RangePlan,
    plan_chunks,
    target_fragment_bytes,
)
from objectcache_storage_server.service import Service
from objectcache_storage_server.transports.base import Transport
from objectcache_storage_server.transports.body import BodyTransport
from objectcache_storage_server.transports.shared_memory import SharedMemoryTransport

logger = logging.getLogger("objectcache.storage_server.gets")


class RunningDelivery:
    """A delivery, and its end as something the event loop can wait for."""

    def __init__(self, plan: Plan, opened: OpenObjects, transport: Transport, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.delivery = Delivery(plan, opened, transport, self._on_end, name)

    def _on_end(self, delivery: Delivery) -> None:
        self._loop.call_soon_threadsafe(self.ended.set)

    async def cancel(self, why: str) -> None:
        """End it, and return when nothing reads or writes for it any more."""
        self.delivery.fail(DeliveryFailed(why))
        await asyncio.shield(self.ended.wait())


@dataclass(frozen=True, slots=True)
class BodyDelivery:
    """A running delivery whose payload goes into a socket."""

    running: RunningDelivery
    transport: BodyTransport
    payload_bytes: int

    async def close(self, why: str) -> None:
        """End it if it has not ended, and give its memory back."""
        await self.running.cancel(why)
        self.transport.release()


async def serve_object(service: Service, talk: Conversation, request: OpenObject) -> None:
    """`OpenObject`, then the range that the gateway chose."""
    opened = await service.call(service.engine.open_many, request.bucket, [request.key])
    try:
        info = opened.infos[0]
        if info is None:
            raise NotFound(f"{request.key!r} is not stored", key=request.key)
        await talk.send(ObjectOpened(info=info))
        choice = await talk.receive_body_choice()
        if not isinstance(choice, SendBody):
            await talk.send(Done())
            return
        service.admit_delivery()
    except BaseException:
        opened.close()
        raise
    try:
        await _send_body(service, talk, _start_range(service, opened, info, choice), choice)
    finally:
        service.end_delivery()


def _start_range(
    service: Service, opened: OpenObjects, info: ObjectInfo, choice: SendBody
) -> BodyDelivery:
    end_bytes = choice.offset_bytes + choice.length_bytes
    if not 0 <= choice.offset_bytes <= end_bytes <= info.size_bytes:
        opened.close()
        raise InvalidRequest("the range lies outside the object", code="InvalidRange")
    plan = RangePlan(
        opened.placements()[0],
        choice.offset_bytes,
        choice.length_bytes,
        service.storage.fragment_bytes,
    )
    return _start_body(service, plan, opened, info.key)


async def serve_kv_get(service: Service, talk: Conversation, request: KvGet) -> None:
    """`KvGet`: plan the delivery, say so, and carry it to its end."""
    descriptor = Descriptor.from_bytes(request.descriptor, service.limits)
    service.admit_delivery()
    try:
        opened = await service.call(_open_prefix, service, request.bucket, descriptor)
        plan, accepted = _plan(service, opened, descriptor)
        if descriptor.rdma_target is None:
            body = _start_body(service, plan, opened, request.request_id)
            await _serve_body(service, talk, body, accepted)
        else:
            running = _start_target(service, plan, opened, request, descriptor.rdma_target)
            await _serve_target(service, talk, running, accepted)
    finally:
        service.end_delivery()


def _plan(
    service: Service, opened: OpenObjects, descriptor: Descriptor
) -> tuple[ChunkPlan, DeliveryAccepted]:
    """What will be delivered, and what the gateway is told of it."""
    chunk_count = len(opened.infos)
    payload_bytes = descriptor.payload_bytes(chunk_count)
    threshold_bytes = service.storage.layerwise_threshold_bytes
    mode = choose_mode(descriptor.delivery, payload_bytes, threshold_bytes)
    accepted = DeliveryAccepted(
        delivery=mode.value,
        chunk_count=chunk_count,
        layer_bytes=chunk_count * descriptor.per_layer_chunk_bytes,
        body_bytes=0 if descriptor.rdma_target else payload_bytes,
    )
    fragment_bytes = service.storage.fragment_bytes
    if descriptor.rdma_target is not None:
        fragment_bytes = target_fragment_bytes(
            accepted.layer_bytes,
            service.reader_threads,
            fragment_bytes,
            service.storage.target_fragment_bytes_max,
        )
    return plan_chunks(descriptor, opened.placements(), mode, fragment_bytes), accepted


def _open_prefix(service: Service, bucket: str, descriptor: Descriptor) -> OpenObjects:
    """Open the chunks that will be delivered. Raises for the first that is missing or misfit."""
    layout = service.engine.bucket(bucket).layout
    if layout is not None:
        descriptor.check_layout(layout)
    opened = service.engine.open_many(bucket, descriptor.chunk_keys, are_prefix=True)
    try:
        stored = _stored_prefix(opened.infos)
        if stored == len(opened.infos):
            _check_sizes(opened.infos, descriptor)
            return opened
        if stored == 0 or descriptor.on_missing is OnMissing.FAIL:
            key = descriptor.chunk_keys[stored]
            raise NotFound(
                f"chunk_keys[{stored}] ({key!r}) is not stored", missing_index=stored, key=key
            )
    except BaseException:
        opened.close()
        raise
    opened.close()
    shorter = service.engine.open_many(bucket, descriptor.chunk_keys[:stored], are_prefix=True)
    if _stored_prefix(shorter.infos) < stored:  # deleted in between
        shorter.close()
        raise NotFound(f"chunk_keys[{stored - 1}] is not stored", missing_index=stored - 1)
    try:
        _check_sizes(shorter.infos, descriptor)
    except BaseException:
        shorter.close()
        raise
    return shorter


def _stored_prefix(infos: Sequence[ObjectInfo | None]) -> int:
    return next((index for index, info in enumerate(infos) if info is None), len(infos))


def _check_sizes(infos: Sequence[ObjectInfo | None], descriptor: Descriptor) -> None:
    for index, info in enumerate(infos):
        if info is not None and info.size_bytes != descriptor.chunk_bytes:
            raise InvalidRequest(
                f"chunk_keys[{index}] ({info.key!r}) holds {info.size_bytes} bytes, num_layers x "
                f"per_layer_chunk_bytes is {descriptor.chunk_bytes}",
                code="DescriptorMismatch",
                key=info.key,
            )


def _start_body(service: Service, plan: Plan, opened: OpenObjects, name: str) -> BodyDelivery:
    """Begin reading into buffers; at most the delivery's grant runs ahead of the client.

    Takes `opened` over, whether it succeeds or not, as `_start_target` does.
    """
    wanted_bytes = min(
        max(service.storage.delivery_in_flight_bytes_max, service.storage.fragment_bytes),
        service.pool.charged_bytes(plan.payload_bytes),
    )
    try:
        granted_bytes = service.pool.grant(wanted_bytes)
    except BaseException:
        opened.close()
        raise
    transport = BodyTransport(
        service.pool, granted_bytes, lambda: service.dispatcher.wake(running.delivery)
    )
    running = RunningDelivery(plan, opened, transport, name)
    service.dispatcher.wake(running.delivery)
    return BodyDelivery(running, transport, plan.payload_bytes)


def _start_target(
    service: Service, plan: Plan, opened: OpenObjects, request: KvGet, asked: MemoryTarget
) -> RunningDelivery:
    """Begin reading straight into the client's registered memory."""
    try:
        if asked.transport != SharedMemoryTransport.name:
            raise Unsupported(
                f"rdma_target.transport {asked.transport!r} is not served; "
                f"{SharedMemoryTransport.name!r} is"
            )
        lease = service.registry.lease(request.identity, asked, plan.payload_bytes)
    except BaseException:
        opened.close()
        raise
    session = lease.target.owner
    assert isinstance(session, Session)
    transport = SharedMemoryTransport(lease, asked.tag, session.post)
    running = RunningDelivery(plan, opened, transport, request.request_id)
    lease.on_release(running.delivery.fail)
    service.dispatcher.wake(running.delivery)
    return running


async def _serve_body(
    service: Service, talk: Conversation, body: BodyDelivery, accepted: DeliveryAccepted
) -> None:
    try:
        await talk.send(accepted)
        choice = await talk.receive_body_choice()
        if not isinstance(choice, SendBody):
            await body.close("the gateway took no body")
            await talk.send(Done())
            return
    except BaseException:
        await body.close("the gateway is gone")
        raise
    await _send_body(service, talk, body, choice)


async def _send_body(
    service: Service, talk: Conversation, body: BodyDelivery, choice: SendBody
) -> None:
    """Send the payload where `choice` says, until it is through or somebody is gone."""
    descriptor = talk.take_descriptor()
    if not choice.into_socket:
        await _send_watched(service, talk, body, talk.stream)
        return
    if descriptor is None:
        await body.close("no socket came with SendBody")
        raise InvalidRequest("SendBody with into_socket needs a socket beside it")
    client = StreamSocket(sockets.socket(fileno=descriptor))
    try:
        await _send_watched(service, talk, body, client)
    finally:
        client.close()
    if not talk.given_up:
        await talk.send(BodySent(length_bytes=body.payload_bytes))


async def _send_watched(
    service: Service, talk: Conversation, body: BodyDelivery, stream: StreamSocket
) -> None:
    """Send, and stop when the gateway hangs up. A body that cannot be completed is cut.

    Only a stall ends a body that its client still takes, however long it takes.
    """
    storage = service.storage
    sending = asyncio.ensure_future(
        body.transport.send(stream, body.payload_bytes, storage.send_stall_timeout_s)
    )
    watching = asyncio.ensure_future(talk.stream.closed_by_peer())
    why = "the gateway is gone"
    try:
        await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        if sending.done():
            error = sending.exception()
            if error is None:
                return
            why = str(error)
    finally:
        watching.cancel()
        if not sending.done():
            sending.cancel()
        await asyncio.gather(sending, watching, return_exceptions=True)
        await body.close(why)
    logger.info("delivery %s was cut: %s", body.running.delivery.name, why)
    talk.give_up()


async def _serve_target(
    service: Service, talk: Conversation, running: RunningDelivery, accepted: DeliveryAccepted
) -> None:
    watching = asyncio.ensure_future(talk.stream.closed_by_peer())
    ending = asyncio.ensure_future(running.ended.wait())
    timeout_s = service.storage.delivery_timeout_s
    try:
        await talk.send(accepted)
        await asyncio.wait(
            {ending, watching}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not ending.done() and not watching.done():
            await running.cancel(f"it took over {timeout_s:g} s (storage.delivery_timeout_s)")
    finally:
        watching.cancel()
        ending.cancel()
        await asyncio.gather(watching, ending, return_exceptions=True)
        await running.cancel("the client or the gateway is gone")
    await talk.send(_ended(running.delivery))


def _ended(delivery: Delivery) -> DeliveryEnded:
    if delivery.state is DeliveryState.COMPLETE:
        return DeliveryEnded(payload_bytes=delivery.plan.payload_bytes)
    error = delivery.error
    assert isinstance(error, ObjectCacheError)
    return DeliveryEnded(payload_bytes=0, error=error.to_wire(), failed_layer=delivery.end_layer)
