"""Conversations that send bytes: an opened object, or a delivery of a prefix."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack

from objectcache_runtime.buffers import MemoryGrant
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import InvalidRequest, NotFound
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import KvGet
from objectcache_schemas.messages.reads import ObjectOpened, OpenObject, SendBody
from objectcache_storage_server.accounts.in_flight import Flight
from objectcache_storage_server.conversations.conversation import Asker, Conversation
from objectcache_storage_server.deliveries.body_gets import (
    body_wish,
    receive_choice,
    send_body,
    serve_body,
    start_body,
    wait_for_memory,
)
from objectcache_storage_server.deliveries.delivery_mode import choose_mode
from objectcache_storage_server.deliveries.delivery_path import forced_mode, is_body, path_taken
from objectcache_storage_server.deliveries.delivery_records import new_recorder, recorded
from objectcache_storage_server.deliveries.open_prefix import open_prefix
from objectcache_storage_server.deliveries.plan import (
    ChunkPlan,
    RangePlan,
    plan_chunks,
    target_fragment_bytes,
)
from objectcache_storage_server.deliveries.running_delivery import (
    TCP,
    BodyDelivery,
    BodyMemory,
    Terms,
)
from objectcache_storage_server.deliveries.staging_grants import grant_staging
from objectcache_storage_server.deliveries.target_gets import serve_target, start_target
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.s3.small_gets import open_small
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.windows.find_windows import Window
from objectcache_storage_server.service import Service
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.transports.fabrics import check_transport
from objectcache_storage_server.transports.shared_memory import SharedMemoryTransport


async def serve_object(service: Service, talk: Conversation, request: OpenObject) -> None:
    """`OpenObject`, then the range that the gateway chose."""
    recorder = new_recorder(service, request)
    async with service.entrance.admitted(request.identity, talk.stream.closed_by_peer) as waited_s:
        recorder.queued(waited_s)
        small = open_small(service, request, recorder)
        if small is not None:
            await talk.send(small)
            return
        async with service.in_flight.flight(
            request.identity, request.bucket, service.call
        ) as flight:
            await _serve_large(service, talk, request, recorder, flight)


async def _serve_large(
    service: Service,
    talk: Conversation,
    request: OpenObject,
    recorder: DeliveryRecorder,
    flight: Flight,
) -> None:
    """An object that is not read at once."""
    opened = await service.call_to_open(
        lambda: service.engine.open_many(request.bucket, [request.key]), OpenObjects.close
    )
    with ExitStack() as undo:
        undo.callback(opened.close)
        info = opened.infos[0]
        if info is None:
            raise NotFound(f"{request.key!r} is not stored", key=request.key)
        # Memory comes first: once the gateway knows the object it begins to answer.
        fragment_bytes = service.fragment_bytes(service.storage.fragment_bytes, 0)
        wish = body_wish(service, info.size_bytes, fragment_bytes)
        flight.add_bytes(min(info.size_bytes, wish.wanted_bytes))
        memory = await wait_for_memory(service, talk, request.identity, wish, recorder)
        undo.callback(memory.release)
        await talk.send(ObjectOpened(info=info))
        choice = await receive_choice(talk, memory)
        if isinstance(choice, SendBody):
            undo.pop_all()  # the delivery takes them over
    if not isinstance(choice, SendBody):
        await talk.send(Done())
        return
    with recorded(service, recorder):
        body = _start_range(
            service, opened, choice, recorder, request.identity, fragment_bytes, memory
        )
        await send_body(service, talk, body, choice)


def _start_range(
    service: Service,
    opened: OpenObjects,
    choice: SendBody,
    recorder: DeliveryRecorder,
    tenant: str,
    fragment_bytes: int,
    memory: BodyMemory,
) -> BodyDelivery:
    """Takes `opened` and the grant over, whether it succeeds or not."""
    with ExitStack() as undo:
        undo.callback(opened.close)
        undo.callback(memory.release)
        end_bytes = choice.offset_bytes + choice.length_bytes
        size_bytes = opened.infos[0].size_bytes if opened.infos[0] else 0
        if not 0 <= choice.offset_bytes <= end_bytes <= size_bytes:
            raise InvalidRequest("the range lies outside the object", code="InvalidRange")
        plan = RangePlan(
            opened.placements()[0], choice.offset_bytes, choice.length_bytes, fragment_bytes
        )
        demand = Demand(max(1, choice.length_bytes), None, 1, tenant=tenant)
        terms = Terms(recorder, demand, service.policy)
        undo.pop_all()  # the delivery takes them over
    wish = body_wish(service, choice.length_bytes, fragment_bytes)
    grant = memory.grant
    grant.shrink(max(0, grant.granted_bytes - wish.wanted_bytes))  # it may need less than all
    return start_body(service, plan, opened, terms, memory)


async def serve_kv_get(service: Service, talk: Conversation, request: KvGet) -> None:
    """`KvGet`: plan the delivery, say so, and carry it to its end."""
    descriptor = Descriptor.from_bytes(request.descriptor, service.limits)
    await serve_get(service, talk, request, descriptor)


async def serve_get(service: Service, asker: Asker, request: KvGet, descriptor: Descriptor) -> None:
    """A get, whoever brought it; what goes into a body is asked for in a `Conversation`."""
    if descriptor.rdma_target is not None:
        check_transport(descriptor.rdma_target.transport)
    mode = forced_mode(
        request.path,
        descriptor.delivery,
        len(descriptor.chunk_keys),
        descriptor.rdma_target is not None,
    )
    recorder = new_recorder(service, request)
    with recorded(service, recorder):
        async with (
            service.in_flight.flight(
                request.identity, request.bucket, service.call, deliveries=1
            ) as flight,
            service.entrance.admitted(request.identity, asker.gone) as waited_s,
        ):
            recorder.queued(waited_s)
            await _serve_prefix(service, asker, request, descriptor, mode, recorder, flight)


async def _serve_prefix(
    service: Service,
    asker: Asker,
    request: KvGet,
    descriptor: Descriptor,
    mode: DeliveryMode,
    recorder: DeliveryRecorder,
    flight: Flight,
) -> None:
    body_talk = _body_talk(asker, request, descriptor)
    opened, window = await service.call_to_open(
        lambda: open_prefix(service, request, descriptor), lambda found: found[0].close()
    )
    staging: MemoryGrant | None = None
    memory: BodyMemory | None = None
    try:
        plan, terms = _plan(service, opened, descriptor, mode, request, recorder, window)
        if body_talk is not None:
            wish = body_wish(service, plan.payload_bytes, plan.fragment_bytes)
            flight.add_bytes(min(plan.payload_bytes, wish.wanted_bytes))
            memory = await wait_for_memory(service, body_talk, request.identity, wish, recorder)
        else:
            flight.add_bytes(plan.payload_bytes)
            staging = await _wait_for_staging(service, asker, request, plan, descriptor, recorder)
    except BaseException:
        opened.close()
        raise
    if body_talk is not None:
        assert memory is not None
        body = start_body(service, plan, opened, terms, memory)
        await serve_body(service, body_talk, body)
    else:
        running = start_target(service, plan, opened, request, descriptor, terms, staging)
        await serve_target(service, asker, running)


def _body_talk(asker: Asker, request: KvGet, descriptor: Descriptor) -> Conversation | None:
    """The conversation that the payload leaves as a body of; None where it goes into a target."""
    if not is_body(request.path, descriptor.rdma_target is not None):
        return None
    assert isinstance(asker, Conversation), "a session asks for targets alone"
    return asker


def _is_staged(descriptor: Descriptor) -> bool:
    """Whether the payload goes by way of staging memory: over a fabric."""
    target = descriptor.rdma_target
    return target is not None and target.transport != SharedMemoryTransport.name


async def _wait_for_staging(
    service: Service,
    asker: Asker,
    request: KvGet,
    plan: ChunkPlan,
    descriptor: Descriptor,
    recorder: DeliveryRecorder,
) -> MemoryGrant | None:
    """Wait for staging memory where the payload goes by way of it; otherwise None."""
    if not _is_staged(descriptor):
        return None
    asked_s = time.monotonic()
    grant = await grant_staging(service, asker, request.identity, plan.payload_bytes)
    recorder.queued(time.monotonic() - asked_s)
    return grant


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
        fragment_bytes_max = service.storage.target_fragment_bytes_max
        if _is_staged(descriptor):
            fragment_bytes_max = service.fabrics.staging.buffer_bytes
        fragment_bytes = target_fragment_bytes(
            layer_bytes, service.reader_threads, fragment_bytes, fragment_bytes_max
        )
    rate_max = descriptor.rate_bytes_per_s or math.inf
    fragment_bytes = service.fragment_bytes(
        fragment_bytes, descriptor.per_layer_chunk_bytes, rate_max
    )
    plan = plan_chunks(descriptor, opened.placements(), mode, fragment_bytes)
    terms = Terms(
        recorder,
        Demand(layer_bytes, window.compute_window_s, layer_count, tenant=request.identity),
        service.policy,
        window,
        path_taken(request.path, mode, chunk_count, has_target).value,
        descriptor.rdma_target.transport if descriptor.rdma_target else TCP,
        mode,
        chunk_count,
        rate_max,
    )
    return plan, terms
