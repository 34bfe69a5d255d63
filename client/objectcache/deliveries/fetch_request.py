"""One fetch, and how it is asked for: over HTTP, or over the session that has its target."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from objectcache.channel import requests
from objectcache.channel.http_channel import Exchange
from objectcache.channel.request_labels import current_traceparent, new_request_id
from objectcache.channel.responses import DeliveryHead, head_of_session_get, parse_delivery_head
from objectcache.core import ClientCore, TransportChoice
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import OutcomeReceiver, Receiver, SessionReceiver
from objectcache.landing.regions import Landing
from objectcache.landing.targets import FabricTarget, PlainTarget, Target
from objectcache.learned_windows import FetchShape
from objectcache.sessions.session_get import SessionGet
from objectcache.sessions.target_session import TargetSession
from objectcache_schemas.compute_windows import WHOLE_S
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import AccessDenied, InvalidRequest
from objectcache_schemas.messages.sessions import GetPrefix

SESSION_DESCRIPTOR_BYTES_MAX = 60 << 10  # a session's message has 64 KiB at most; longer: HTTP


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """One fetch. `started_s` is by time.monotonic; the delivery's arrivals count from it."""

    bucket: str
    descriptor: Descriptor
    target: Target | None
    transport: TransportChoice
    timeout_s: float
    started_s: float
    path: DeliveryPath | None = None
    request_id: str = field(default_factory=new_request_id)

    def __post_init__(self) -> None:
        if self.target is None:
            return
        if not isinstance(self.target, Target):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(
                f"target must be a PlainTarget or come from client.shared_memory_target, "
                f"got {type(self.target).__name__}; a writable buffer fits in PlainTarget(buffer)"
            )
        if self.target.length_bytes < self.payload_bytes:
            raise InvalidRequest(
                f"the target holds {self.target.length_bytes} bytes, "
                f"the payload needs {self.payload_bytes}"
            )
        _check_fits(self.target, self.transport)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload when every chunk is stored."""
        return self.descriptor.payload_bytes(len(self.descriptor.chunk_keys))

    def shape(self, chunk_count: int) -> FetchShape:
        """What its compute times depend on, with as many chunks delivered."""
        asked = self.descriptor
        return FetchShape(
            self.bucket,
            chunk_count,
            asked.context_tokens,
            asked.fingerprint,
            asked.computed_tokens,
        )

    @property
    def wants_the_whole(self) -> bool:
        """Whether nothing is computed between layers, so that consuming them teaches nothing."""
        return self.descriptor.compute_window_s == WHOLE_S

    def progress(self, silence_s_max: float | None) -> LayerProgress:
        """Progress of a delivery that has not begun."""
        first_layer, end_layer = self.descriptor.first_layer, self.descriptor.end_layer
        return LayerProgress(first_layer, end_layer, self.started_s, silence_s_max)


def _check_fits(target: Target, transport: TransportChoice) -> None:
    """Raise `InvalidRequest` where the transport cannot fill the target."""
    if isinstance(target, FabricTarget):
        if transport not in (TransportChoice.AUTO, TransportChoice(target.transport)):
            raise InvalidRequest(
                f"the target was made for transport {target.transport!r}, got {transport.value!r}"
            )
    elif transport.is_fabric:
        raise InvalidRequest(
            f"transport {transport.value!r} fills targets of client.fabric_target, got "
            f"{type(target).__name__}"
        )
    elif isinstance(target, PlainTarget) and transport is TransportChoice.SHARED_MEMORY:
        raise InvalidRequest(
            "a PlainTarget cannot be filled through shared memory; use client.shared_memory_target"
        )


def begin_into_target(
    core: ClientCore,
    request: FetchRequest,
    descriptor: Descriptor,
    landing: Landing,
    progress: LayerProgress,
    session: TargetSession,
) -> tuple[DeliveryHead, Receiver]:
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
            traceparent=current_traceparent() or "",
        )
    )
    try:
        begun = get.wait_begun(request.timeout_s)
        return head_of_session_get(begun, descriptor, request.request_id), get
    except BaseException:
        session.cancel_get(get)
        raise


def begin_over_http(
    core: ClientCore, request: FetchRequest, descriptor: Descriptor
) -> tuple[Exchange, DeliveryHead]:
    """Returns when the server has accepted it; raises its refusal."""
    asked = requests.get_headers(request.request_id, request.path, current_traceparent())
    get = requests.get(request.bucket, descriptor, asked, request.started_s)
    exchange = core.channel.open(get, request.timeout_s)
    try:
        return exchange, parse_delivery_head(exchange.header, descriptor)
    except BaseException:
        exchange.abandon()
        raise
