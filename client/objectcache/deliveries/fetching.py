"""How a fetch chooses its transport and becomes a running delivery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from objectcache.arguments import checked_count
from objectcache.channel.responses import DeliveryHead
from objectcache.core import ClientCore, RegisteredMemory, TransportChoice
from objectcache.deliveries.consumption import ConsumptionReports, no_reports
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.feedback import teach_windows, tell_session
from objectcache.deliveries.fetch_request import (
    FetchRequest,
    begin_into_target,
    begin_over_http,
)
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import BodyReceiver, Receiver
from objectcache.landing.fabric_regions import FabricRegion, GivenRegion, device_memory_of
from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.refusals import may_fall_back, was_refused
from objectcache.landing.regions import Landing, Region, SharedRegion, nothing
from objectcache.landing.targets import FabricTarget, PlainTarget, SharedMemoryTarget
from objectcache.payload import PayloadShape
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import InvalidRequest, NotFound, ObjectCacheError, Unavailable

SHARED_MEMORY = TransportChoice.SHARED_MEMORY.value
BODY = TransportChoice.BODY.value


def fetch(core: ClientCore, request: FetchRequest) -> Delivery:
    """Begin a delivery; returns when the server has accepted it.

    Raises the server's refusal, or `Unavailable` with the reason where shared memory was demanded
    and cannot be had.
    """
    fabric = _fabric_of(request)
    if fabric is not None:
        return _fetch_registered(core, request, core.memory(fabric))
    if request.transport is TransportChoice.BODY or isinstance(request.target, PlainTarget):
        return _fetch_body(core, request)
    try:
        return _fetch_registered(core, request, core.shared)
    except (Unavailable, NotFound) as error:
        if request.transport is TransportChoice.SHARED_MEMORY or not may_fall_back(error):
            raise
    return _fetch_body(core, request)


def _fabric_of(request: FetchRequest) -> TransportChoice | None:
    """The fabric that the delivery comes over; None where it comes over none."""
    if isinstance(request.target, FabricTarget):
        return TransportChoice(request.target.transport)
    return request.transport if request.transport.is_fabric else None


def empty_delivery(layers: tuple[int, int], slice_bytes: int) -> Delivery:
    """The delivery of no chunks: complete, without asking a server."""
    first_layer, end_layer = layers
    progress = LayerProgress(first_layer, end_layer)
    progress.advance(end_layer)
    shape = PayloadShape(first_layer, end_layer, 0, slice_bytes, DeliveryMode.LAYERWISE)
    return Delivery(progress, shape, np.empty(0, np.uint8), None, transport=BODY)


def shared_memory_target(core: ClientCore, length_bytes: int) -> SharedMemoryTarget:
    """Shared memory of the caller's own, registered. Raises `Unavailable`."""
    length_bytes = checked_count("length_bytes", length_bytes)
    session = core.sessions.session()
    region = SharedRegion(MemoryFile(length_bytes))
    region.target_id(session)
    target = SharedMemoryTarget(region)
    core.targets.add(target)
    return target


def stock_memory(core: ClientCore, lengths_bytes: Sequence[int]) -> int:
    """Make and register memory for deliveries of these lengths; how many bytes there was room for.

    Raises `Unavailable` where deliveries do not come into registered memory.
    """
    choice = core.settings.transport
    if choice is TransportChoice.BODY:
        raise Unavailable("deliveries come in bodies")
    memory = core.memory(choice)
    session = memory.sessions.session()

    def register(region: Region) -> None:
        region.target_id(session)

    stocked = (length for length in lengths_bytes if memory.pool.stock(length, register))
    return sum(stocked)


def fabric_target(
    core: ClientCore, transport: str | None, length_bytes: int | None, buffer: Any
) -> FabricTarget:
    """Memory that a fabric reaches: as many bytes of our own, or the caller's `buffer`."""
    own = core.settings.transport
    choice = own if own.is_fabric else TransportChoice.NIXL
    if transport is not None:
        choice = TransportChoice.parse(transport)
    if not choice.is_fabric:
        raise InvalidRequest(f"transport must be nixl or verbs, got {transport!r}")
    if (length_bytes is None) == (buffer is None):
        raise InvalidRequest("give either length_bytes or buffer")
    region: Region
    if buffer is not None:
        region = GivenRegion(*device_memory_of(buffer))
    else:
        region = FabricRegion(checked_count("length_bytes", length_bytes))
    memory = core.memory(choice)
    region.target_id(memory.sessions.session())
    target = FabricTarget(region, choice.value)
    memory.targets.add(target)
    return target


def _fetch_registered(
    core: ClientCore, request: FetchRequest, memory: RegisteredMemory
) -> Delivery:
    session = memory.sessions.session()
    if request.target is None:
        landing = memory.pool.lease(request.payload_bytes, request.timeout_s)
    else:
        landing = request.target.claim(request.timeout_s)
    progress = request.progress(silence_s_max=request.timeout_s)
    try:
        tag = session.listen(progress)
        try:
            target = _memory_target(request, landing, session, tag, memory.transport)
            descriptor = replace(request.descriptor, rdma_target=target)
            head, receiver = begin_into_target(
                core, request, descriptor, landing, progress, session
            )
        except BaseException:
            session.forget(tag)
            raise
    except BaseException as error:
        if was_refused(error):
            landing.settle()
        else:
            if request.target is not None:
                request.target.closing()
            landing.withdraw()
        raise
    reports = _telling(request, head, progress, session, tag)
    return _start(core, request, head, progress, landing, receiver, memory.transport, reports)


def _telling(
    request: FetchRequest,
    head: DeliveryHead,
    progress: LayerProgress,
    session: TargetSession,
    tag: int,
) -> ConsumptionReports:
    if request.wants_the_whole:
        return no_reports(progress)
    layer_bytes = head.chunk_count * request.descriptor.per_layer_chunk_bytes
    return tell_session(progress, session, tag, layer_bytes)


def _memory_target(
    request: FetchRequest, landing: Landing, session: TargetSession, tag: int, transport: str
) -> MemoryTarget:
    assert landing.region is not None
    return MemoryTarget(
        transport=transport,
        target_id=landing.region.target_id(session),
        offset_bytes=0,
        length_bytes=request.payload_bytes,
        tag=tag,
    )


def _fetch_body(core: ClientCore, request: FetchRequest) -> Delivery:
    # An explicit target is claimed first: a refusal must not cost the server a delivery.
    landing = None if request.target is None else request.target.claim(request.timeout_s)
    progress = request.progress(silence_s_max=None)  # the socket's timeout bounds it
    try:
        exchange, head = begin_over_http(core, request, _with_learned_window(core, request))
        shape = head.shape(request.descriptor)
        if exchange.length_bytes != shape.payload_bytes:
            exchange.abandon()
            raise ObjectCacheError(
                f"the server announced a body of {exchange.length_bytes} bytes "
                f"for a payload of {shape.payload_bytes}"
            )
        landing = landing or Landing(np.empty(shape.payload_bytes, np.uint8), None, nothing)
    except BaseException:
        if landing is not None:
            landing.settle()
        raise
    receiver = BodyReceiver(exchange, landing, progress, shape)
    reports = _teaching(core, request, head.chunk_count, progress)
    return _start(core, request, head, progress, landing, receiver, BODY, reports)


def _with_learned_window(core: ClientCore, request: FetchRequest) -> Descriptor:
    """The descriptor, with what earlier deliveries took where the caller says nothing."""
    descriptor = request.descriptor
    if not core.settings.learn_windows or descriptor.model is not None:
        return descriptor
    if descriptor.compute_window_s is not None:
        return descriptor
    window_s = core.windows.window_s(request.shape(len(descriptor.chunk_keys)))
    return replace(descriptor, compute_window_s=window_s)


def _teaching(
    core: ClientCore, request: FetchRequest, chunk_count: int, progress: LayerProgress
) -> ConsumptionReports:
    if not core.settings.learn_windows or request.wants_the_whole:
        return no_reports(progress)
    layer_bytes = chunk_count * request.descriptor.per_layer_chunk_bytes
    return teach_windows(progress, core.windows, request.shape(chunk_count), layer_bytes)


def _start(
    core: ClientCore,
    request: FetchRequest,
    head: DeliveryHead,
    progress: LayerProgress,
    landing: Landing,
    receiver: Receiver,
    transport: str,
    reports: ConsumptionReports,
) -> Delivery:
    delivery = Delivery(
        progress,
        head.shape(request.descriptor),
        landing.array,
        receiver,
        transport=transport,
        head=head,
        target=request.target,
        reports=reports,
        owner=core,
    )
    receiver.start(core.threads)
    return delivery
