"""What a client says that its GPU is through with, and who is told."""

from __future__ import annotations

import asyncio
import time

from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.messages import KvGet, LayersConsumed
from objectcache_storage_server.connections.running import RunningDelivery
from objectcache_storage_server.connections.sessions import Session
from objectcache_storage_server.deliver import DeliveryState
from objectcache_storage_server.service import Service

CONSUMED_LATEST_S = 60.0  # after the end of a delivery that is whole


class ConsumptionWatch:
    """Tells the scheduler, the trace and whoever learns what the client says it has consumed.

    A GPU goes on after the last byte, so it is listened to for some time after the end.
    """

    def __init__(
        self,
        service: Service,
        running: RunningDelivery,
        session: Session,
        tag: int,
        request: KvGet,
        descriptor: Descriptor,
    ) -> None:
        self._service = service
        self._running = running
        self._session = session
        self._tag = tag
        self._request = request
        self._descriptor = descriptor
        self._callback = self._consumed  # one object, by which it is known
        session.watch_consumption(tag, self._callback)

    def _consumed(self, message: LayersConsumed) -> None:
        terms, descriptor = self._running.terms, self._descriptor
        end_layer = min(message.end_layer, descriptor.end_layer)
        terms.recorder.layers_consumed(end_layer, time.monotonic())
        self._service.dispatcher.consumed(
            self._running.delivery, end_layer - descriptor.first_layer
        )
        self._service.windows.learn(
            descriptor,
            self._request.bucket,
            self._request.identity,
            terms.chunk_count,
            message.compute_s,
        )
        if end_layer == descriptor.end_layer:
            self._forget()

    def delivery_ended(self) -> None:
        """Nothing is written any more. Of a delivery that is not whole nothing more is heard."""
        if self._running.delivery.state is DeliveryState.COMPLETE:
            asyncio.get_running_loop().call_later(CONSUMED_LATEST_S, self._forget)
        else:
            self._forget()

    def _forget(self) -> None:
        self._session.forget_consumption(self._tag, self._callback)
