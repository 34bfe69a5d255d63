"""What a client says that its GPU is through with, and who is told."""

from __future__ import annotations

import asyncio
import time

from objectcache_schemas.compute_windows import WindowSource, is_computed
from objectcache_schemas.messages.sessions import LayersConsumed
from objectcache_storage_server.deliveries.delivery import DeliveryState, ServedDelivery
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.running_delivery import RunningDelivery
from objectcache_storage_server.scheduling.windows.learn_windows import WINDOW_MIN_S, DeliveryShape
from objectcache_storage_server.transports.targets import TargetOwner

CONSUMED_LATEST_S = 60.0  # after the end of a delivery that is whole


class ConsumptionWatch:
    """Tells the scheduler, the trace and whoever learns what the client says it has consumed.

    A GPU goes on after the last byte, so it is listened to for some time after the end: until all
    is consumed, another delivery has its tag, or its session ends. By then the delivery itself is
    let go; a session watches a bounded number of them. All in the event loop.
    """

    def __init__(
        self,
        means: GetMeans,
        running: RunningDelivery,
        session: TargetOwner,
        tag: int,
        identity: str,
        shape: DeliveryShape,
    ) -> None:
        """Of a delivery whose client wants all layers at once nothing is learned."""
        self._means = means
        self._delivery: ServedDelivery | None = running.delivery  # until it ends
        self._recorder = running.terms.recorder
        self._first_layer = running.delivery.plan.first_layer
        self._end_layer = running.delivery.plan.end_layer
        self._consumed_end = self._first_layer
        self._session = session
        self._tag = tag
        self._identity = identity
        self._shape = shape
        self._teaches = running.terms.window.source is not WindowSource.WHOLE
        layer_count = self._end_layer - self._first_layer
        self._layer_bytes = running.delivery.plan.decoded_bytes // layer_count
        self._timer: asyncio.TimerHandle | None = None
        self._callback = self._consumed  # one object, by which it is known
        self._is_watching = session.watch_consumption(tag, self._callback, self._dropped)
        running.after_end(self._delivery_ended)

    def _consumed(self, message: LayersConsumed) -> None:
        end_layer = min(message.end_layer, self._end_layer)
        self._count(end_layer, message)
        compute_s = self._window_s(message.compute_s)
        self._recorder.layers_consumed(end_layer, time.monotonic(), compute_s)
        if self._delivery is not None:
            self._means.schedule.dispatcher.consumed(
                self._delivery, end_layer - self._first_layer, compute_s
            )
        if self._teaches:
            self._means.windows.learn(self._identity, self._shape, message.compute_s)
        if end_layer == self._end_layer:
            self._forget()

    def _window_s(self, compute_s: float) -> float | None:
        """An engine that asks ahead of its GPU, or only copies, says nothing of a window."""
        is_window = compute_s >= WINDOW_MIN_S and is_computed(compute_s, self._layer_bytes)
        return compute_s if is_window else None

    def _count(self, end_layer: int, message: LayersConsumed) -> None:
        """Count each layer once, whatever the client says how often."""
        layers = end_layer - self._consumed_end
        self._means.counts.layers_consumed(
            self._identity, layers, message.compute_s, message.waited_s
        )
        self._consumed_end = max(self._consumed_end, end_layer)

    def _delivery_ended(self) -> None:
        """Nothing is written any more. Of a delivery that is not whole nothing more is heard."""
        delivery, self._delivery = self._delivery, None
        if delivery is None or delivery.state is not DeliveryState.COMPLETE:
            self._forget()
        elif self._is_watching:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(CONSUMED_LATEST_S, self._forget)

    def _forget(self) -> None:
        self._session.forget_consumption(self._tag, self._callback)
        self._dropped()

    def _dropped(self) -> None:
        self._is_watching = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
