"""One fetch, and how it is asked for over HTTP."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, replace

from objectcache.channel import requests
from objectcache.channel.http_channel import GatewayExchange
from objectcache.channel.request_labels import current_traceparent
from objectcache.channel.responses import DeliveryHead, parse_delivery_head
from objectcache.core import ClientCore, TransportChoice
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.landing.targets import FabricTarget, PlainTarget, Target
from objectcache.learned_windows import FetchShape
from objectcache_encodings.lossy import LossyDtype, dtype_text
from objectcache_schemas.compute_windows import WHOLE_S
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.messages.request_labels import new_request_id


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """One fetch. `started_s` is by time.monotonic; the delivery's arrivals count from it.
    `traceparent` is the span that it belongs to, whichever thread asks for it.

    Of an encoded payload the delivery gives decoded layers, unless `decodes` is false: then layers
    as they were sent, which the caller decodes by the delivery's directory. Where it
    `chooses_encodings`, the client does, by what it has learned of the bucket. Of a lossy payload
    it gives layers that `lossy` has dequantised. `is_dequantised_away`: a fetcher is asked to, so
    what lands are the model's slices.
    """

    bucket: str
    descriptor: Descriptor
    target: Target | None
    transport: TransportChoice
    timeout_s: float
    started_s: float
    path: DeliveryPath | None = None
    request_id: str = field(default_factory=new_request_id)
    traceparent: str | None = field(default_factory=current_traceparent)
    decodes: bool = True
    chooses_encodings: bool = False
    lossy: LossyDtype | None = None
    is_dequantised_away: bool = False

    def __post_init__(self) -> None:
        if self.target is None:
            return
        if not isinstance(self.target, Target):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequest(
                f"target must be a PlainTarget or come from client.shared_memory_target, "
                f"got {type(self.target).__name__}; a writable buffer fits in PlainTarget(buffer)"
            )
        if self.target.length_bytes < self.wanted_bytes and self.descriptor.ring_layers is None:
            raise InvalidRequest(
                f"the target holds {self.target.length_bytes} bytes, "
                f"the payload needs {self.wanted_bytes}"
            )
        _check_fits(self.target, self.transport)
        if self.decodes_elsewhere and self.target.array.nbytes < self.target.length_bytes:
            raise InvalidRequest(
                "a target in a GPU's memory takes neither encodings nor lossy chunks: nothing here "
                "decodes or dequantises into it"
            )

    @property
    def decodes_elsewhere(self) -> bool:
        """Whether the payload may not land in the caller's target, which gets layers that are made
        of it.
        """
        makes = self.lossy is not None or (self.decodes and bool(self.descriptor.encodings))
        return makes and self.target is not None

    def into_own_memory(self) -> FetchRequest:
        """The same, by the same transport, without the caller's target."""
        choice = self.memory_choice
        if isinstance(self.target, PlainTarget):
            choice = TransportChoice.BODY
        return replace(self, target=None, transport=choice)

    def without_encodings(self) -> FetchRequest:
        """The same of a plain payload."""
        if not self.descriptor.encodings:
            return self
        return replace(self, descriptor=replace(self.descriptor, encodings=None))

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

    @property
    def room_bytes(self) -> int:
        """Bytes of registered memory that it is asked into. Places of a ring are whole pages, which
        disks are read into as they are, where layers have room in them then.
        """
        ring_layers = self.descriptor.ring_layers
        if ring_layers is None or self.target is None:
            return self.payload_bytes
        place_bytes = self.target.length_bytes // ring_layers
        whole_bytes = place_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        layer_count = self.descriptor.end_layer - self.descriptor.first_layer
        has_room = whole_bytes * layer_count >= self.payload_bytes
        return ring_layers * (whole_bytes if has_room else place_bytes)

    @property
    def dequantise(self) -> str:
        """What a fetcher is told of that; empty where it is not to."""
        if self.lossy is None or not self.is_dequantised_away:
            return ""
        return dtype_text(self.lossy)

    @property
    def landed_slice_bytes(self) -> int:
        """Bytes of a slice as it lands, where it does not come encoded."""
        if self.lossy is None or not self.is_dequantised_away:
            return self.descriptor.per_layer_chunk_bytes
        return self.lossy.shape.slice_bytes

    @property
    def landed_bytes(self) -> int:
        """Bytes of the whole payload as it lands."""
        slice_count = self.payload_bytes // self.descriptor.per_layer_chunk_bytes
        return slice_count * self.landed_slice_bytes

    @property
    def wanted_bytes(self) -> int:
        """Bytes of what the caller is given then."""
        if self.lossy is None:
            return self.payload_bytes
        slice_count = self.payload_bytes // self.descriptor.per_layer_chunk_bytes
        return slice_count * self.lossy.shape.slice_bytes

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
    asked = requests.get_headers(
        request.request_id, request.path, request.traceparent, request.dequantise
    )
    get = requests.get(request.bucket, descriptor, asked, request.started_s)
    exchange = core.channel.open(get, request.timeout_s)
    try:
        return exchange, parse_delivery_head(
            exchange.header, descriptor, request.landed_slice_bytes
        )
    except BaseException:
        exchange.abandon()
        raise
