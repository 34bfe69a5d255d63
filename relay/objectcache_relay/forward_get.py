"""One get through the relay: what lands for it, the pieces, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial

from objectcache.deliveries.consumption import Consumption
from objectcache.deliveries.delivery import Delivery
from objectcache.encoding_choice.encoding_account import EndedDelivery
from objectcache_relay.forwarding import (
    PIECE_BYTES_MAX,
    ForwardedPiece,
    Forwarding,
    ForwardingEnd,
    PeerTraffic,
)
from objectcache_relay.landing.arrived_get import seen
from objectcache_relay.landing.forward_spans import ForwardTracer, SentOn
from objectcache_relay.landing.landed_prefixes import LandedPrefix, Landings, LandingUse
from objectcache_relay.landing.ring_plan import through_landing
from objectcache_relay.landing.upstream import AskedForward
from objectcache_relay.sinks.piece_sink import LandedPiece, PieceSink
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import Busy, DeliveryFailed, ObjectCacheError
from objectcache_schemas.messages.sessions import LayersConsumed

OpenSink = Callable[["ForwardedGet"], Awaitable[PieceSink]]


class ForwardMeans:
    """What all gets of a relay share."""

    def __init__(
        self,
        landings: Landings,
        in_flight_bytes_max: int,
        tracer: ForwardTracer,
        *,
        has_rings: bool = False,
    ) -> None:
        """With `has_rings` payloads over the landing memory go round in it, else none comes."""
        self.landings = landings
        self.has_rings = has_rings
        self.tracer = tracer
        self.in_flight_bytes_max = in_flight_bytes_max
        self.gets: set[ForwardedGet] = set()
        self.is_draining = False

    def upstream_get(self, asked: AskedForward) -> AskedForward:
        """What is asked upstream for a get."""
        if not self.has_rings:
            return asked
        return through_landing(asked, self.landings.grants.capacity_bytes)

    def __repr__(self) -> str:
        return f"<ForwardMeans {len(self.gets)} gets, {self.landings!r}>"


class PeerLine:
    """The gets that one engine's session, or body, is sent. Used in the event loop."""

    def __init__(self, in_flight_bytes_max: int) -> None:
        self._traffic = PeerTraffic(in_flight_bytes_max)
        self._gets: dict[Forwarding, ForwardedGet] = {}
        self._is_writing = False

    def add(self, get: ForwardedGet) -> None:
        """One more get, whose forwarding is known."""
        self._gets[get.forwarding] = get
        self._traffic.add(get.forwarding)

    def remove(self, get: ForwardedGet) -> None:
        """A get that has ended."""
        del self._gets[get.forwarding]
        self._traffic.remove(get.forwarding)

    def ended(
        self, get: ForwardedGet, piece: ForwardedPiece, error: ObjectCacheError | None
    ) -> None:
        """A piece of a get is written, or never will be."""
        self._traffic.ended(get.forwarding, piece, error)

    def write(self) -> None:
        """Begin what may be. A call from within, of a piece that is written at once, leaves that
        to the one outside.
        """
        if self._is_writing:
            return
        self._is_writing = True
        try:
            while (found := self._traffic.next_write()) is not None:
                self._gets[found[0]].write(found[1])
        finally:
            self._is_writing = False


class ForwardedGet:
    """One get. `run` carries it; the other methods are told what happens meanwhile."""

    def __init__(
        self, means: ForwardMeans, asked: AskedForward, line: PeerLine, transport: str
    ) -> None:
        """`transport` is how pieces go on, for the metrics."""
        self._means = means
        self._counts = means.landings.counts
        self.asked = asked
        self.line = line
        self.transport = transport
        self.gone = asyncio.Event()  # whoever asked wants it no more
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._changed = asyncio.Event()
        self._use = LandingUse(self.gone, self._changed.set, self.line)
        self._is_looking = False
        self._landed: LandedPrefix | None = None
        self._upstream_get = asked
        self._forwarding: Forwarding | None = None
        self._sink: PieceSink | None = None
        self._begun_s = time.monotonic()
        self._begin_bytes = 0  # in the landing memory
        self._accepted_s = 0.0
        self._announced_end = asked.descriptor.first_layer

    @property
    def is_accepted(self) -> bool:
        """Whether the upstream has accepted it."""
        return self._landed is not None

    @property
    def landed(self) -> LandedPrefix:
        """What it is sent, once that is accepted."""
        assert self._landed is not None
        return self._landed

    @property
    def delivery(self) -> Delivery:
        """The upstream's, once it is accepted; it may have more layers."""
        return self.landed.delivery

    @property
    def forwarding(self) -> Forwarding:
        """What is sent when, once the upstream is accepted."""
        assert self._forwarding is not None
        return self._forwarding

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload, once the upstream is accepted."""
        return self.asked.descriptor.payload_bytes(self.delivery.chunk_count)

    def seen(self) -> EndedDelivery | None:
        """What its upstream and its decoding took, once all of it was sent; None where that says
        nothing of the link.
        """
        assert self._sink is not None
        now_s = time.monotonic()
        return seen(self._upstream_get, self.landed, self._accepted_s, now_s, self._sink.decode_s)

    async def run(self, open_sink: OpenSink) -> ForwardingEnd:
        """Carry it to its end, in which nothing moves any more. `open_sink` is called once the
        upstream has accepted. Not to be cancelled: `gone` ends it.

        Raises the refusal, `open_sink`'s too: nothing was announced then.
        """
        self.asked, span = self._means.tracer.begin(self.asked, self.transport)
        code: str | None = None  # of a get that ends in a way that nobody foresaw
        try:
            end = await self._run(open_sink)
            code = end.error.code if end.error is not None else ""
            return end
        except ObjectCacheError as error:
            code = error.code
            raise
        finally:
            if code is not None:
                self._counts.ended.add(code)
            span.end(code, None if self._landed is None else self._sent())

    def _sent(self) -> SentOn:
        """Of a get that was accepted."""
        landed = self.landed
        return SentOn(
            chunk_count=landed.delivery.chunk_count,
            payload_bytes=self.payload_bytes,
            is_first_use=landed.asked is self._upstream_get,
        )

    async def _run(self, open_sink: OpenSink) -> ForwardingEnd:
        means = self._means
        if means.is_draining:
            self._counts.refused.add("draining")
            raise Busy("the relay is about to stop; have it delivered directly", retry_after_s=1.0)
        means.gets.add(self)
        try:
            self._upstream_get = means.upstream_get(self.asked)
            self._landed = await means.landings.use(self._upstream_get, self._use)
            return await self._forward(self._landed, open_sink)
        finally:
            self._use.leave()
            means.gets.discard(self)

    async def _forward(self, landed: LandedPrefix, open_sink: OpenSink) -> ForwardingEnd:
        descriptor = self.asked.descriptor
        self._forwarding = Forwarding(
            descriptor.first_layer,
            descriptor.end_layer,
            landed.layer_bytes,
            is_whole=landed.delivery.mode != DeliveryMode.LAYERWISE.value,
            piece_bytes_max=_piece_bytes_max(
                landed.delivery.slice_bytes, self.asked.as_written.per_layer_chunk_bytes
            ),
        )
        self._accepted_s = time.monotonic()
        self._begin_bytes = (
            descriptor.first_layer - landed.delivery.layers.start
        ) * landed.layer_bytes
        sink = self._sink = await open_sink(self)
        self.line.add(self)
        gone = asyncio.ensure_future(self._stop_when_gone())
        try:
            return await self._until_ended(landed)
        finally:
            gone.cancel()
            self.line.remove(self)
            sink.close()

    async def _until_ended(self, landed: LandedPrefix) -> ForwardingEnd:
        """Until all has come that is to come, and nothing is being written."""
        while True:
            self._changed.clear()
            if (end := self._look(landed)) is not None:
                return end
            await self._changed.wait()

    def _look(self, landed: LandedPrefix) -> ForwardingEnd | None:
        """Begin and announce what may be; how it ended, where it has."""
        forwarding = self.forwarding
        self._is_looking = True  # a piece that is written while it is begun is seen here
        try:
            forwarding.arrived(min(landed.arrived_end, self.asked.descriptor.end_layer))
            if landed.is_over or forwarding.is_stopped or not forwarding.awaited_bytes:
                forwarding.upstream_ended(landed.error if landed.is_over else None)
            self.line.write()
            self._announce()
            return forwarding.end()
        finally:
            self._is_looking = False

    async def _stop_when_gone(self) -> None:
        await self.gone.wait()
        self.stop(DeliveryFailed("the delivery was cancelled"))

    def stop(self, error: ObjectCacheError) -> None:
        """Send nothing more; in the event loop."""
        self.forwarding.stop(error)
        if self._sink is not None:
            self._sink.stop()
        self._changed.set()

    def stop_soon(self, error: ObjectCacheError) -> None:
        """See `stop`; from any thread."""
        self._loop.call_soon_threadsafe(self.stop, error)

    def write(self, piece: ForwardedPiece) -> None:
        """Begin to write a piece."""
        assert self._sink is not None
        landed, begin = self.landed, self._begin_bytes + piece.offset_bytes
        try:
            rows = landed.rows(begin, piece.length_bytes)
            begin = rows[0].offset_bytes
            end = begin if landed.delivery.is_encoded else begin + piece.length_bytes
            view = landed.region.view[begin:end]
            self._sink.write(
                LandedPiece(landed.region, piece.offset_bytes, view, rows),
                partial(self._written_soon, piece),
            )
        except ObjectCacheError as error:
            self._written_soon(piece, error)

    def _written_soon(self, piece: ForwardedPiece, error: ObjectCacheError | None) -> None:
        if threading.get_ident() == self._thread:
            self._written(piece, error)
        else:
            self._loop.call_soon_threadsafe(self._written, piece, error)

    def _written(self, piece: ForwardedPiece, error: ObjectCacheError | None) -> None:
        self.line.ended(self, piece, error)
        if error is None:
            self._counts.forwarded_bytes.add(self.transport, piece.length_bytes)
        self.line.write()  # another get of the session may have waited for it
        if error is not None or not self._is_looking:
            self._changed.set()

    def _announce(self) -> None:
        end_layer = self.forwarding.announcement()
        if end_layer is None:
            return
        assert self._sink is not None
        now_s = time.monotonic()
        for layer in range(self._announced_end, end_layer):
            arrived_s = self.delivery.progress.arrived_s(layer)
            if arrived_s is not None:
                self._counts.forward_lag.observe(max(0.0, now_s - max(arrived_s, self._begun_s)))
        self._announced_end = end_layer
        self.landed.written(end_layer)
        self._sink.announce(end_layer)

    def consumed(self, message: LayersConsumed) -> None:
        """The engine is through with layers, which the storage server's scheduler wants to know of
        the get that it serves: of others that use what lands it knows nothing.
        """
        if self.landed.asked is self._upstream_get:
            self.delivery.reports.pass_on(
                Consumption(
                    message.end_layer, message.compute_s, message.waited_s, is_measured=True
                )
            )

    def __repr__(self) -> str:
        return f"<ForwardedGet {self.asked.request_id}, {self._forwarding!r}>"


def _piece_bytes_max(slice_bytes: int, written_slice_bytes: int) -> int:
    """Whole slices, so that frames can be decoded: as many as are a piece when they are written,
    too.
    """
    return max(1, PIECE_BYTES_MAX // max(slice_bytes, written_slice_bytes)) * slice_bytes
