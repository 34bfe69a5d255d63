"""One fetch, and how it is asked for over HTTP."""

from __future__ import annotations

from dataclasses import dataclass, field

from objectcache.channel import requests
from objectcache.channel.http_channel import GatewayExchange
from objectcache.channel.request_labels import current_traceparent, new_request_id
from objectcache.channel.responses import DeliveryHead, parse_delivery_head
from objectcache.core import ClientCore, TransportChoice
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.landing.targets import FabricTarget, PlainTarget, Target
from objectcache.learned_windows import FetchShape
from objectcache_schemas.compute_windows import WHOLE_S
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import InvalidRequest


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
    def memory_choice(self) -> TransportChoice:
        """Whose registered memory the bytes come into; AUTO: shared memory, or else the body."""
        if isinstance(self.target, FabricTarget):
            return TransportChoice(self.target.transport)
        return self.transport

    @property
    def comes_in_body(self) -> bool:
        """Whether nothing but the body can bring the bytes."""
        return self.transport is TransportChoice.BODY or isinstance(self.target, PlainTarget)

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


def begin_over_http(
    core: ClientCore, request: FetchRequest, descriptor: Descriptor
) -> tuple[GatewayExchange, DeliveryHead]:
    """Returns when the server has accepted it; raises its refusal."""
    asked = requests.get_headers(request.request_id, request.path, current_traceparent())
    get = requests.get(request.bucket, descriptor, asked, request.started_s)
    exchange = core.channel.open(get, request.timeout_s)
    try:
        return exchange, parse_delivery_head(exchange.header, descriptor)
    except BaseException:
        exchange.abandon()
        raise
