"""A running retrieval, as its consumer sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from objectcache.arguments import checked_compute_s
from objectcache.channel.responses import DeliveryHead
from objectcache.deliveries.consumption import ConsumptionReports, no_reports
from objectcache.deliveries.delivery_facts import DeliveryFacts
from objectcache.deliveries.encoded.delivery_watch import DeliveryWatch
from objectcache.deliveries.encoded.layer_views import LayerViews, PlainLayers
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache.deliveries.receivers import LayerReceiver
from objectcache.landing.targets import Target
from objectcache.payload import Bytes, PayloadShape
from objectcache.routes.taken_route import TakenRoute, only_direct
from objectcache_encodings.payload_directory import PayloadDirectory
from objectcache_schemas.errors import DamagedData, DeliveryFailed

CLOSE_TIMEOUT_S = 5.0  # for threads and servers that are about to end anyway


class Delivery(DeliveryFacts):
    """Layers that arrive in order. Use it in a `with` block, from one thread.

    The server's scheduler hears what the engine has consumed where the layers land in shared
    memory: who waits for a layer is through with those that it has, and who closes after the last
    one is through with all. An engine whose calls run ahead of its GPU says it itself:
    `report_explicitly` at the start, then `consumed`. None of this blocks, or fails.

    The arrays are views of the delivery's memory, without a copy. They stay valid after `close`:
    memory of the client's own is not used again while any of them lives, and an explicit target is
    the caller's.
    """

    def __init__(
        self,
        progress: LayerProgress,
        shape: PayloadShape,
        memory: Bytes,
        receiver: LayerReceiver | None,
        *,
        transport: str,
        head: DeliveryHead | None = None,
        target: Target | None = None,
        reports: ConsumptionReports | None = None,
        owner: object = None,
        route: TakenRoute | None = None,
        layers: LayerViews | None = None,
        watch: DeliveryWatch | None = None,
    ) -> None:
        """`owner` is kept alive with the delivery. Without a receiver everything is there; without
        a head no server was asked. Without `layers` they are the plain ones in `memory`. `watch` is
        told how it went.
        """
        layers = layers or PlainLayers(shape, memory)
        super().__init__(progress, shape, head, transport, route or only_direct(), layers)
        self._receiver = receiver
        self._target = target
        self._owner = owner
        self._reports = reports or no_reports(progress)
        self._watch = watch

    @property
    def progress(self) -> LayerProgress:
        """The events behind this delivery, for event loops."""
        return self._progress

    @property
    def reports(self) -> ConsumptionReports:
        """Where consumption is told, for whoever goes on telling when the delivery is let go."""
        return self._reports

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> Bytes:
        """Wait until a layer is usable: uint8[chunk_count, per_layer_chunk_bytes].

        A chunkwise delivery's layers are usable together, at its end, and their views are strided.
        Raises `InvalidRequest` for a layer that was not asked for. Raises `DeliveryFailed`
        (`details.layer` is the first that is not known to have arrived) when the delivery ended
        early or, with the delivery going on, after `timeout_s`. Without one the fetch's timeout
        bounds the time in which nothing arrives. A layer that came encoded is decoded here, in the
        calling thread, the first time that it is asked for; `DeliveryFailed` names the chunk in
        which it is damaged.
        """
        self.wait_begins(layer)
        self._progress.wait(layer, timeout_s)
        view = self.ready_layer(layer)
        self.wait_ended(layer)
        return view

    def wait_begins(self, layer: int) -> None:
        """Note that the engine wants a layer; for event loops, as `progress` is.

        Raises `InvalidRequest` for one that was not asked for.
        """
        self._progress.check(layer)
        self._reports.wait_begins(layer)
        if self._watch is not None:
            self._watch.wait_begins()

    def wait_ended(self, layer: int) -> None:
        """Note that the engine was given a layer."""
        self._reports.wait_ended(layer)
        if self._watch is not None:
            self._watch.wait_ended()

    def ready_layer(self, layer: int) -> Bytes:
        """The view of a layer, which may be looked into once it is known to be usable: then it is
        decoded here, where it came encoded. Raises `DeliveryFailed` where it cannot be.
        """
        return self._layers.layer(layer, layer < self._progress.ready_end)

    def wait(self, timeout_s: float | None = None) -> Bytes:
        """Wait for all layers: uint8[layers, chunk_count, per_layer_chunk_bytes].

        A strided view when chunkwise. Raises as `wait_layer` does. Where the layers land in shared
        memory, the server need not announce those before the last: this process is seldom woken.
        """
        last = self._shape.end_layer - 1
        self.wait_begins(last)
        self._progress.wait(last, timeout_s)
        whole = self._layers.whole()
        self.wait_ended(last)
        return whole

    def wait_directory(self, timeout_s: float | None = None) -> PayloadDirectory | None:
        """Wait for the directory of an encoded payload, which comes with the first layer; None of a
        plain one, at once. Raises as `wait_layer` does.
        """
        wire = self._layers.wire
        if wire is None:
            return None
        self._progress.wait(self._shape.first_layer, timeout_s)
        try:
            return wire.directory
        except DamagedData as error:
            first = self._shape.first_layer
            raise DeliveryFailed(f"layer {first}: {error.message}", layer=first) from error

    def consumed(self, layer: int, compute_s: float | None = None) -> None:
        """Say that the engine is through with the layers up to this one; from any thread.

        `compute_s` is what each of them took, waiting left out; by default the time since the last
        call, or since the first of them arrived. From the first call on nothing is deduced from
        waits. A layer that has not arrived, or was told before, is ignored; calls after the close
        are heard for as long as the server listens. Raises `InvalidRequest`
        for one that was not asked for, and for a `compute_s` that is no time.
        """
        self._progress.check(layer)
        self._reports.consumed(layer, checked_compute_s("compute_s", compute_s))

    def report_explicitly(self) -> None:
        """Deduce nothing from waits: the engine's calls run ahead of its GPU, and it will call
        `consumed`.
        """
        self._reports.report_explicitly()

    def __iter__(self) -> Iterator[tuple[int, Bytes]]:
        """Layers in order, each as soon as it is usable."""
        for layer in self.layers:
            yield layer, self.wait_layer(layer)

    def close(self) -> None:
        """End the delivery; before its end this closes its connection, so that the server stops.

        Repeating has no effect. Layers that were usable stay so.
        """
        self._reports.close()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.closed(self, self._layers.decode_s)
        self._layers.close()
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if self._target is not None:
            self._target.closing()
        if self._progress.complete and receiver.join(CLOSE_TIMEOUT_S):
            return
        receiver.cancel()
        receiver.join(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<Delivery {self.request_id or 'of nothing'}, {self.mode}, {self.transport}, "
            f"{self.chunk_count} chunks, {self._progress!r}>"
        )
