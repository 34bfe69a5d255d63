"""Fetches that the storage server writes into registered memory by itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial

from objectcache.channel import requests
from objectcache.channel.responses import DeliveryHead, head_of_session_get
from objectcache.core import ClientCore
from objectcache.deliveries.begun_fetch import BegunFetch
from objectcache.deliveries.consumption import no_reports
from objectcache.deliveries.encoded.wire_payload import WirePayload
from objectcache.deliveries.feedback import spare_events, tell_session
from objectcache.deliveries.fetch_request import FetchRequest, begin_over_http
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import LayerReceiver, OutcomeReceiver, SessionReceiver
from objectcache.landing.refusals import is_going, was_refused
from objectcache.landing.regions import Landing
from objectcache.landing.registered_memory import RegisteredMemory
from objectcache.sessions.session_get import SessionGet
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import AccessDenied, ObjectCacheError
from objectcache_schemas.messages.sessions import GetPrefix

SESSION_DESCRIPTOR_BYTES_MAX = 60 << 10  # a session's message has 64 KiB at most; longer: HTTP


def begin_into_target(
    core: ClientCore, request: FetchRequest, memory: RegisteredMemory
) -> BegunFetch:
    """Returns when the server has accepted it. Raises its refusal, and `Unavailable` where there is
    no session.
    """
    session = memory.sessions.session()
    if request.target is None:
        landing = memory.pool.lease(request.payload_bytes, request.timeout_s)
    else:
        landing = request.target.claim(request.timeout_s)
    progress = request.progress(silence_s_max=request.timeout_s)
    try:
        session = memory.sessions.session()  # memory may have been long in coming
        place = TargetPlace(memory.transport, 0, request.room_bytes)
        head, receiver, tag = ask_session(
            core, request, request.descriptor, place, landing, progress, session
        )
    except BaseException as error:
        if isinstance(error, ObjectCacheError) and is_going(error):
            memory.sessions.leave(session)
        if was_refused(error):
            landing.settle()
        else:
            if request.target is not None:
                request.target.closing()
            landing.withdraw()
        raise
    layer_bytes = head.chunk_count * request.descriptor.per_layer_chunk_bytes
    reports = (
        no_reports(progress)
        if request.wants_the_whole
        else tell_session(progress, session, tag, layer_bytes)
    )
    learns_of_each = request.chooses_encodings  # by when it arrived
    frees_each = request.descriptor.ring_layers is not None
    if head.mode is DeliveryMode.LAYERWISE and not (learns_of_each or frees_each):
        spare_events(progress, session, tag)
    wire = None
    if head.directory_bytes:
        shape = head.shape(request.descriptor)
        wire = WirePayload(landing.array, shape.payload_bytes, head.directory_bytes, shape)
    return BegunFetch(
        head,
        progress,
        landing,
        receiver,
        reports,
        memory.transport,
        wire=wire,
        free_layers=partial(session.free_layers, tag),
    )


@dataclass(frozen=True, slots=True)
class TargetPlace:
    """The part of registered memory that a server is to fill, by this transport."""

    transport: str
    offset_bytes: int
    length_bytes: int


def ask_session(
    core: ClientCore,
    request: FetchRequest,
    descriptor: Descriptor,
    place: TargetPlace,
    landing: Landing,
    progress: LayerProgress,
    session: TargetSession,
) -> tuple[DeliveryHead, LayerReceiver, int]:
    """Have the session's server deliver what the descriptor names into the landing's memory.

    Returns what it answers, who receives, and the tag. Raises the server's refusal, and
    `Unavailable` where the session ends; `was_refused` tells whether the memory is free then.
    """
    assert landing.region is not None
    tag = session.listen(progress)
    try:
        target = MemoryTarget(
            transport=place.transport,
            target_id=landing.region.target_id(session),
            offset_bytes=place.offset_bytes,
            length_bytes=place.length_bytes,
            tag=tag,
        )
        asked = replace(descriptor, rdma_target=target)
        return *_ask(core, request, asked, landing, progress, session), tag
    except BaseException:
        session.forget(tag)
        raise


def _ask(
    core: ClientCore,
    request: FetchRequest,
    descriptor: Descriptor,
    landing: Landing,
    progress: LayerProgress,
    session: TargetSession,
) -> tuple[DeliveryHead, LayerReceiver]:
    """Begin a delivery into a target: over the session where that may get from the bucket by
    itself, else over HTTP, which may allow the session to.
    """
    assert descriptor.rdma_target is not None
    if session.may_get(request.bucket) and request.path is not DeliveryPath.BUFFER:
        data = requests.descriptor_bytes(descriptor)
        if len(data) <= SESSION_DESCRIPTOR_BYTES_MAX:
            try:
                head, get = _begin_on_session(request, descriptor, data, session)
                return head, SessionReceiver(get, landing, progress, session)
            except AccessDenied:  # not any more; over HTTP it is said who may what
                session.refused_get(request.bucket)
    exchange, head = begin_over_http(core, request, descriptor)
    tag = descriptor.rdma_target.tag
    return head, OutcomeReceiver(exchange, landing, progress, session, tag)


def _begin_on_session(
    request: FetchRequest, descriptor: Descriptor, data: bytes, session: TargetSession
) -> tuple[DeliveryHead, SessionGet]:
    """Raises `AccessDenied` where the session may not get from the bucket by itself any more.

    A get that is given up, because nothing is said in time or for any other reason, is cancelled:
    the server may have it in a queue, where taking the target away does not end it.
    """
    assert descriptor.rdma_target is not None
    get = session.get(
        GetPrefix(
            tag=descriptor.rdma_target.tag,
            bucket=request.bucket,
            descriptor=data,
            request_id=request.request_id,
            path=request.path.value if request.path else "",
            client_s=max(0.0, time.monotonic() - request.started_s),
            traceparent=request.traceparent or "",
            dequantise=request.dequantise,
        )
    )
    try:
        begun = get.wait_begun(request.timeout_s)
        return head_of_session_get(begun, descriptor, request.request_id), get
    except BaseException:
        session.cancel_get(get)
        raise
