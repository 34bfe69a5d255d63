"""What is known of a delivery without waiting, whichever face of the client has it."""

from __future__ import annotations

from objectcache.channel.responses import DeliveryHead
from objectcache.deliveries.encoded.layer_views import LayerViews
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.payload import PayloadShape
from objectcache.routes.taken_route import TakenRoute


class DeliveryFacts:
    """`transport` is `shared_memory`, `body`, `nixl` or `verbs`."""

    def __init__(
        self,
        progress: LayerProgress,
        shape: PayloadShape,
        head: DeliveryHead | None,
        transport: str,
        route: TakenRoute,
        layers: LayerViews,
    ) -> None:
        self._progress = progress
        self._shape = shape
        self._head = head
        self.transport = transport
        self._route = route
        self._layers = layers

    @property
    def head(self) -> DeliveryHead | None:
        """What was answered; None where nobody was asked."""
        return self._head

    @property
    def route(self) -> str:
        """Over whose storage NIC the layers come now: `direct`, `relay:NODE`, or
        `split:direct=N,relay:NODE=M` with the chunks of each.
        """
        return self._route.word

    @property
    def route_reason(self) -> str:
        """Why this route, in words for people; where one failed, what became of it."""
        return self._route.reason

    @property
    def request_id(self) -> str:
        """The request's name in the servers' logs and traces."""
        return self._head.request_id if self._head else ""

    @property
    def path(self) -> str | None:
        """The path that the server took: s3tcp, buffer, direct, batch or agg; None: it does not
        say.
        """
        return self._head.path if self._head else None

    @property
    def rate_bytes_per_s(self) -> int | None:
        """The rate that the server assigned when the delivery began; None: it assigned none. It may
        change while others come and go (the server's `scheduler.rates`).
        """
        return self._head.rate_bytes_per_s if self._head else None

    @property
    def window_source(self) -> str | None:
        """Where the server has the compute window from: descriptor, profile or learned; whole:
        nothing is computed between layers; disbelieved: shorter than any layer takes.

        None: it has none, or does not say.
        """
        return self._head.window_source if self._head else None

    @property
    def content(self) -> str | None:
        """A digest of the objects' ETags: layers of two deliveries go together where they have the
        same. None: the server does not say.
        """
        return self._head.content if self._head else None

    @property
    def chunk_count(self) -> int:
        """Chunks delivered; fewer than asked only with `on_missing="truncate"`."""
        return self._shape.chunk_count

    @property
    def slice_bytes(self) -> int:
        """Bytes of one chunk's slice of a layer."""
        return self._shape.slice_bytes

    @property
    def mode(self) -> str:
        """`layerwise` or `chunkwise`."""
        return self._shape.mode.value

    @property
    def is_encoded(self) -> bool:
        """Whether the payload comes encoded, in part at least."""
        return self._layers.wire is not None

    @property
    def delivered_bytes(self) -> int:
        """Bytes of all layers, decoded, and dequantised where they are lossy."""
        return self._shape.payload_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of all layers as their chunks have them: decoded, not dequantised."""
        return self._layers.stored_bytes

    @property
    def wire_bytes(self) -> int | None:
        """Bytes of the payload as it is sent; None of an encoded one before its first layer was
        looked at.
        """
        return self._layers.wire_bytes

    @property
    def layers(self) -> range:
        """The layers of the delivery."""
        return range(self._shape.first_layer, self._shape.end_layer)

    @property
    def arrivals_s(self) -> tuple[float | None, ...]:
        """For each layer of `layers`, seconds from the fetch call until it was known to be usable;
        None until then. Layers before one that is waited for may be heard of together with it.
        """
        return tuple(self._progress.arrivals_s)
