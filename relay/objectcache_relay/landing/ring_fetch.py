"""A payload that comes by one request into landing memory that is smaller than it.

The storage server writes it there by itself, and is told of each layer that is sent on. Or it comes
in a body: where the next layer has no room nothing is read, so the connection fills, and the server
sends no more until there is some: TCP's window is the credit.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import numpy as np

from objectcache.channel.http_channel import GatewayExchange
from objectcache.core import ClientCore
from objectcache.deliveries.begun_fetch import BODY
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.encoded.layer_views import LayerViews
from objectcache.deliveries.encoded.wire_payload import WirePayload
from objectcache.deliveries.fetch_into_body import begin_body
from objectcache.deliveries.fetch_request import FetchRequest
from objectcache.deliveries.fetching import begin_in_memory, begin_with_known_encodings
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import PIECE_BYTES_MAX, ExchangeReceiver
from objectcache.landing.regions import Landing
from objectcache.landing.targets import Target
from objectcache.payload import Bytes, PayloadShape
from objectcache_encodings.payload_directory import directory_bytes
from objectcache_relay.landing.landing_ring import LandingRing, WrittenRing
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import DamagedData, ObjectCacheError, Unavailable


class RingReceiver(ExchangeReceiver):
    """Reads the directory, where there is one, and then each layer into its place."""

    def __init__(
        self,
        exchange: GatewayExchange,
        landing: Landing,
        progress: LayerProgress,
        layers: RingLayers,
        directory: Bytes,
        ring: LandingRing,
    ) -> None:
        super().__init__(exchange, landing, progress)
        self._payload_bytes = exchange.length_bytes  # of which nothing is read yet
        self._layers = layers
        self._directory = directory
        self._ring = ring

    def _receive(self) -> None:
        self._read(self._directory)
        lengths_bytes = self._layers.lengths_bytes(self._payload_bytes)
        self._ring.divide(max(lengths_bytes))
        memory = self._landing.array
        for layer, length_bytes in enumerate(lengths_bytes, self._progress.first_layer):
            if not self._ring.wait_room(layer):
                return  # it was cancelled
            begin = self._ring.place_bytes(layer)
            self._read(memory[begin : begin + length_bytes])
            self._progress.advance(layer + 1)

    def _read(self, wanted: Bytes) -> None:
        """Raises `Unavailable` where the body ends before."""
        view = wanted.data
        for begin in range(0, len(view), PIECE_BYTES_MAX):
            piece = view[begin : begin + PIECE_BYTES_MAX]
            if self._exchange.readinto(piece) < len(piece):
                raise Unavailable("the body was cut")
            self._progress.stir()

    def _stop(self) -> None:
        super()._stop()
        self._ring.close()

    def _let_go(self) -> None:
        if self._progress.complete:
            self._exchange.finish()
        else:
            self._exchange.abandon()
        self._landing.settle()


class RingLayers(LayerViews):
    """Layers that nobody looks into by the delivery: whoever sends them on knows their places."""

    def __init__(self, shape: PayloadShape, wire: WirePayload | None) -> None:
        """`wire` has the directory alone; None of a plain payload."""
        super().__init__(shape.payload_bytes)
        self.wire = wire
        self._shape = shape

    def lengths_bytes(self, payload_bytes: int | None) -> list[int]:
        """Of each layer as it comes, once the directory is there. Raises `DamagedData` where that
        is not one of so many bytes of payload.
        """
        if self.wire is None:
            return [self._shape.layer_bytes] * self._shape.layer_count
        directory = self.wire.directory
        if directory.payload_bytes != payload_bytes:
            raise DamagedData(
                f"a directory of {directory.payload_bytes} bytes of payload came with "
                f"{payload_bytes}"
            )
        return [end - begin for begin, end in pairwise(directory.layer_offsets)]

    def layer(self, layer: int, is_ready: bool) -> Bytes:
        raise AssertionError("a later layer may lie in its place")

    def whole(self) -> Bytes:
        raise AssertionError("there is not so much memory")


def fetch_into_written_ring(core: ClientCore, request: FetchRequest, ring: WrittenRing) -> Delivery:
    """Begin a layerwise delivery into a ring in the request's registered memory, which the storage
    server writes to; returns when it is accepted. Raises the refusal.
    """
    begun = begin_with_known_encodings(core, request, begin_in_memory)
    shape = begun.head.shape(request.descriptor)
    ring.begin(request.room_bytes // ring.place_count, begun.free_layers)
    delivery = Delivery(
        begun.progress,
        shape,
        begun.landing.array,
        begun.receiver,
        transport=begun.transport,
        head=begun.head,
        target=request.target,
        reports=begun.reports,
        owner=core,
        layers=RingLayers(shape, begun.wire),
    )
    begun.receiver.start(core.threads)
    return delivery


def fetch_into_ring(
    core: ClientCore, request: FetchRequest, target: Target, ring: LandingRing
) -> Delivery:
    """Begin a layerwise delivery in a body into the ring in a target; returns when it is accepted.
    Raises the refusal.
    """
    landing = target.claim(request.timeout_s)
    try:
        return begin_with_known_encodings(core, request, partial(_begin, landing, ring))
    except BaseException:
        landing.settle()
        raise


def _begin(
    landing: Landing, ring: LandingRing, core: ClientCore, request: FetchRequest
) -> Delivery:
    exchange, head = begin_body(core, request, request.descriptor)
    shape = head.shape(request.descriptor)
    longest = directory_bytes(shape.chunk_count, shape.layer_count)
    if shape.mode is not DeliveryMode.LAYERWISE or head.directory_bytes > longest:
        exchange.abandon()
        raise ObjectCacheError(
            f"asked for layers, the server brings a {shape.mode.value} payload, whose directory "
            f"has {head.directory_bytes} bytes of at most {longest}"
        )
    assert exchange.length_bytes is not None, "begin_body has checked it"
    directory = np.empty(head.directory_bytes, np.uint8)
    wire = None
    if directory.size:
        wire = WirePayload(directory, exchange.length_bytes, directory.size, shape)
    layers = RingLayers(shape, wire)
    progress = request.progress(silence_s_max=None)  # the socket's timeout bounds it
    receiver = RingReceiver(exchange, landing, progress, layers, directory, ring)
    delivery = Delivery(
        progress,
        shape,
        landing.array,
        receiver,
        transport=BODY,
        head=head,
        owner=core,
        layers=layers,
    )
    receiver.start(core.threads)
    return delivery
