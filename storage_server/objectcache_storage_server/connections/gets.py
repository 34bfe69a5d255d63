"""Conversations that send bytes: an opened object, or a delivery of a prefix."""

from __future__ import annotations

import asyncio
import logging
import math
import socket as sockets
import time

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import (
    DeliveryFailed,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unsupported,
)
from objectcache_schemas.messages import (
    BodySent,
    DeliveryEnded,
    Done,
    KvGet,
    ObjectInfo,
    ObjectOpened,
    OpenObject,
    SendBody,
)
from objectcache_storage_server.connections.accounts import new_recorder, recorded
from objectcache_storage_server.connections.consumption import ConsumptionWatch
from objectcache_storage_server.connections.conversation import Conversation
from objectcache_storage_server.connections.prefixes import open_prefix
from objectcache_storage_server.connections.running import (
    TCP,
    BodyDelivery,
    RunningDelivery,
    Terms,
    accepted,
    wait_admitted,
)
from objectcache_storage_server.connections.sessions import Session
from objectcache_storage_server.connections.sockets import StreamSocket
from objectcache_storage_server.deliver import Delivery, DeliveryState
from objectcache_storage_server.delivery_path import forced_mode, is_body, path_taken
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.mode import choose_mode
from objectcache_storage_server.plan import (
    ChunkPlan,
    Plan,
    RangePlan,
    plan_chunks,
    target_fragment_bytes,
)
from objectcache_storage_server.scheduling.compute_windows import Window
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.service import Service
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.transports.body import BodyTransport
from objectcache_storage_server.transports.shared_memory import SharedMemoryTransport

logger = logging.getLogger("objectcache.storage_server.gets")


async def serve_object(service: Service, talk: Conversation, request: OpenObject) -> None:
    """`OpenObject`, then the range that the gateway chose."""
    recorder = new_recorder(request)
    async with service.entrance.admitted(request.identity, talk.stream.closed_by_peer) as waited_s:
        recorder.queued(waited_s)
        opened = await service.call(service.engine.open_many, request.bucket, [request.key])
        try:
            info = opened.infos[0]
            if info is None:
                raise NotFound(f"{request.key!r} is not stored", key=request.key)
            await talk.send(ObjectOpened(info=info))
            choice = await talk.receive_body_choice()
        except BaseException:
            opened.close()
            raise
        if not isinstance(choice, SendBody):
            opened.close()
            await talk.send(Done())
            return
        with recorded(service, recorder):
            body = _start_range(service, opened, info, choice, recorder, request.identity)
            await _send_body(service, talk, body, choice)


def _start_range(
    service: Service,
    opened: OpenObjects,
    info: ObjectInfo,
    choice: SendBody,
    recorder: DeliveryRecorder,
    tenant: str,
) -> BodyDelivery:
    end_bytes = choice.offset_bytes + choice.length_bytes
    if not 0 <= choice.offset_bytes <= end_bytes <= info.size_bytes:
        opened.close()
        raise InvalidRequest("the range lies outside the object", code="InvalidRange")
    plan = RangePlan(
        opened.placements()[0],
        choice.offset_bytes,
        choice.length_bytes,
        service.fragment_bytes(service.storage.fragment_bytes, 0),
    )
    demand = Demand(max(1, choice.length_bytes), None, 1, tenant=tenant)
    return _start_body(service, plan, opened, Terms(recorder, demand, service.policy))


async def serve_kv_get(service: Service, talk: Conversation, request: KvGet) -> None:
    """`KvGet`: plan the delivery, say so, and carry it to its end."""
    descriptor = Descriptor.from_bytes(request.descriptor, service.limits)
    mode = forced_mode(
        request.path,
        descriptor.delivery,
        len(descriptor.chunk_keys),
        descriptor.rdma_target is not None,
    )
    recorder = new_recorder(request)
    with recorded(service, recorder):
        gone = talk.stream.closed_by_peer
        async with service.entrance.admitted(request.identity, gone) as waited_s:
            recorder.queued(waited_s)
            await _serve_prefix(service, talk, request, descriptor, mode, recorder)


async def _serve_prefix(
    service: Service,
    talk: Conversation,
    request: KvGet,
    descriptor: Descriptor,
    mode: DeliveryMode,
    recorder: DeliveryRecorder,
) -> None:
    opened, window = await service.call(open_prefix, service, request, descriptor)
    plan, terms = _plan(service, opened, descriptor, mode, request, recorder, window)
    if is_body(request.path, descriptor.rdma_target is not None):
        body = _start_body(service, plan, opened, terms)
        await _serve_body(service, talk, body)
    else:
        running = _start_target(service, plan, opened, request, descriptor, terms)
        await _serve_target(service, talk, running)


def _plan(
    service: Service,
    opened: OpenObjects,
    descriptor: Descriptor,
    asked_mode: DeliveryMode,
    request: KvGet,
    recorder: DeliveryRecorder,
    window: Window,
) -> tuple[ChunkPlan, Terms]:
    """What will be delivered, and on which terms."""
    chunk_count = len(opened.infos)
    mode = choose_mode(
        asked_mode, descriptor.payload_bytes(chunk_count), service.layerwise_threshold_bytes
    )
    layer_bytes = chunk_count * descriptor.per_layer_chunk_bytes
    layer_count = descriptor.end_layer - descriptor.first_layer
    has_target = descriptor.rdma_target is not None
    fragment_bytes = service.storage.fragment_bytes
    if not is_body(request.path, has_target):
        fragment_bytes = target_fragment_bytes(
            layer_bytes,
            service.reader_threads,
            fragment_bytes,
            service.storage.target_fragment_bytes_max,
        )
    fragment_bytes = service.fragment_bytes(fragment_bytes, descriptor.per_layer_chunk_bytes)
    plan = plan_chunks(descriptor, opened.placements(), mode, fragment_bytes)
    terms = Terms(
        recorder,
        Demand(layer_bytes, window.compute_window_s, layer_count, tenant=request.identity),
        service.policy,
        window,
        path_taken(request.path, mode, chunk_count, has_target).value,
        SharedMemoryTransport.name if has_target else TCP,
        mode,
        chunk_count,
        descriptor.rate_bytes_per_s or math.inf,
    )
    return plan, terms


def _start_body(service: Service, plan: Plan, opened: OpenObjects, terms: Terms) -> BodyDelivery:
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
        service.pool,
        granted_bytes,
        lambda: service.dispatcher.wake(running.delivery),
        terms.recorder,
    )
    running = RunningDelivery(service, plan, opened, transport, terms)
    running.start()
    return BodyDelivery(running, transport, plan.payload_bytes)


def _start_target(
    service: Service,
    plan: Plan,
    opened: OpenObjects,
    request: KvGet,
    descriptor: Descriptor,
    terms: Terms,
) -> RunningDelivery:
    """Begin reading straight into the client's registered memory."""
    asked = descriptor.rdma_target
    assert asked is not None
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
    running = RunningDelivery(service, plan, opened, transport, terms)
    lease.on_release(running.delivery.fail)
    watch = ConsumptionWatch(service, running, session, asked.tag, request, descriptor)
    running.when_ended = watch.delivery_ended
    running.start()
    return running


async def _serve_body(service: Service, talk: Conversation, body: BodyDelivery) -> None:
    try:
        await wait_admitted(service, talk, body.running)
        await talk.send(accepted(body.running))
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
    body.running.terms.recorder.ended(time.monotonic(), DeliveryFailed(why).to_wire())
    talk.give_up()


async def _serve_target(service: Service, talk: Conversation, running: RunningDelivery) -> None:
    try:
        await wait_admitted(service, talk, running)
    except BaseException:
        await running.cancel("it was not let in")
        raise
    watching = asyncio.ensure_future(talk.stream.closed_by_peer())
    ending = asyncio.ensure_future(running.ended.wait())
    timeout_s = service.storage.delivery_timeout_s
    try:
        await talk.send(accepted(running))
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
    ended = _ended(running.delivery)
    running.terms.recorder.ended(time.monotonic(), ended.error)
    await talk.send(ended)


def _ended(delivery: Delivery) -> DeliveryEnded:
    if delivery.state is DeliveryState.COMPLETE:
        return DeliveryEnded(payload_bytes=delivery.plan.payload_bytes)
    error = delivery.error
    assert isinstance(error, ObjectCacheError)
    return DeliveryEnded(payload_bytes=0, error=error.to_wire(), failed_layer=delivery.end_layer)
