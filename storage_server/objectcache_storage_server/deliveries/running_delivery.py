"""A delivery that runs, as the event loop sees it, and the terms on which it does."""

from __future__ import annotations

import asyncio
import hashlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from objectcache_runtime.first_of import first_of
from objectcache_runtime.networking.stream_socket import ConnectionEnded
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import Busy, DeliveryFailed
from objectcache_schemas.messages.kv import DeliveryAccepted
from objectcache_schemas.records import ObjectInfo
from objectcache_storage_server.admission.entrance import stopping
from objectcache_storage_server.admission.gates import BodyMemory
from objectcache_storage_server.conversations.conversation import Asker
from objectcache_storage_server.deliveries.delivery import DeliveryState, ServedDelivery
from objectcache_storage_server.deliveries.delivery_path import TCP, is_body
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.plan import Plan
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.windows.find_windows import NO_WINDOW, Window
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.transports.base import Transport
from objectcache_storage_server.transports.body import BodyTransport


@dataclass(frozen=True, slots=True)
class DeliveryTerms:
    """What the scheduler and the trace are told of a delivery."""

    recorder: DeliveryRecorder
    demand: Demand
    policy: str
    window: Window = NO_WINDOW
    path: str = DeliveryPath.S3TCP.value
    transport: str = TCP
    delivery: DeliveryMode = DeliveryMode.CHUNKWISE
    chunk_count: int = 1
    rate_max: float = math.inf
    nic_bytes_per_s: float | None = None  # of the NIC that the demand names

    @property
    def pooled(self) -> bool:
        """Whether it joins the pool (paper, section 3.4): layerwise, and with a window."""
        is_layerwise = self.delivery is DeliveryMode.LAYERWISE
        return is_layerwise and self.demand.compute_window_s is not None

    def record(self, plan: Plan, rate_bytes_per_s: float | None) -> None:
        """Tell the trace that the delivery may begin, or has another rate."""
        self.recorder.accepted(
            path=self.path,
            transport=self.transport,
            delivery=self.delivery.value,
            policy=self.policy,
            chunk_count=self.chunk_count,
            payload_bytes=plan.payload_bytes,
            decoded_bytes=plan.decoded_bytes,
            first_layer=plan.first_layer,
            end_layer=plan.end_layer,
            compute_window_s=self.window.compute_window_s,
            window_source=self.window.source.value,
            rate_bytes_per_s=rate_bytes_per_s,
            now_s=time.monotonic(),
        )


class RunningDelivery:
    """A delivery, and its beginning and end as something the event loop can wait for."""

    def __init__(
        self,
        means: GetMeans,
        plan: Plan,
        opened: OpenObjects,
        transport: Transport,
        terms: DeliveryTerms,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._means = means
        self.terms = terms
        self.transport = transport
        self.admitted = asyncio.Event()
        self.ended = asyncio.Event()
        self.rate_bytes_per_s: float | None = None
        self.content = content_of(opened.infos)  # as the client is told
        self._after_end: list[Callable[[], None]] = []
        self.delivery = ServedDelivery(
            plan, opened, transport, self._on_end, terms.recorder, self._on_admitted
        )
        self.delivery.window_source = terms.window.source.value

    def start(self) -> None:
        """Hand it to the dispatcher; it may begin at once. Where this raises it has failed."""
        terms = self.terms
        try:
            terms.recorder.planned(time.monotonic())
            self._means.schedule.dispatcher.add(
                self.delivery,
                terms.demand,
                pooled=terms.pooled,
                rate_max=terms.rate_max,
                nic_bytes_per_s=terms.nic_bytes_per_s,
            )
        except BaseException:
            self.delivery.fail(DeliveryFailed("it could not be handed over"))
            raise
        if self.delivery.state is not DeliveryState.RUNNING:  # it failed before it was handed over
            self._means.schedule.dispatcher.remove(self.delivery)

    def _on_admitted(self, rate_bytes_per_s: float | None) -> None:
        self.terms.record(self.delivery.plan, rate_bytes_per_s)
        if self.admitted.is_set():  # another rate; the client was told the first
            return
        self.rate_bytes_per_s = rate_bytes_per_s
        if threading.get_ident() == self._loop_thread:
            self.admitted.set()  # at once: the answer need not wait for another round of the loop
        else:
            self._loop.call_soon_threadsafe(self.admitted.set)

    def _on_end(self, delivery: ServedDelivery) -> None:
        try:
            self._means.schedule.dispatcher.remove(delivery)
        finally:
            self.transport.when_quiet(self._quiet)

    def _quiet(self) -> None:
        self._loop.call_soon_threadsafe(self._tell_ended)

    def _tell_ended(self) -> None:
        self.ended.set()
        while self._after_end:
            self._loop.call_soon(self._after_end.pop(0))

    def after_end(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once, in the event loop, when nothing reads or writes for it any
        more; at once where that is so. Called in the event loop.
        """
        if self.ended.is_set():
            callback()
        else:
            self._after_end.append(callback)

    async def cancel(self, why: str) -> None:
        """End it, and return when nothing reads or writes for it any more."""
        self.delivery.fail(DeliveryFailed(why))
        await asyncio.shield(self.ended.wait())


async def wait_admitted(means: GetMeans, asker: Asker, running: RunningDelivery) -> None:
    """Wait until the scheduler lets it begin, which under stall_dynamic it does at once.

    Raises `Busy` where no rate can be had in time, `Unavailable` when the server drains before
    that, and `ConnectionEnded` when whoever asked is gone.
    """
    if running.admitted.is_set():
        return
    timeout_s = means.settings.scheduler.queue_timeout_s
    draining = means.gates.entrance.closed
    events = (running.admitted, running.ended, draining)
    waits = (asker.gone(), *(event.wait() for event in events))
    is_gone, *_ = await first_of(*waits, timeout_s=timeout_s)
    if running.ended.is_set() or running.admitted.is_set():
        return
    if is_gone:
        raise ConnectionEnded
    if draining.is_set():
        raise stopping()
    raise Busy(
        f"no rate was free for {timeout_s:g} s (scheduler.queue_timeout_s)", retry_after_s=timeout_s
    )


@dataclass(frozen=True, slots=True)
class BodyDelivery:
    """A running delivery whose payload goes into a socket."""

    running: RunningDelivery
    transport: BodyTransport
    payload_bytes: int
    memory: BodyMemory

    async def close(self, why: str) -> None:
        """End it if it has not ended, and give its memory back; nothing may be sending.

        Where the caller is cancelled the memory goes back all the same, when it has ended.
        """
        self.memory.unwatch()
        self.running.delivery.fail(DeliveryFailed(why))
        self.running.after_end(self.transport.release)
        await asyncio.shield(self.running.ended.wait())
        self.transport.release()


def accepted(running: RunningDelivery) -> DeliveryAccepted:
    """What the gateway is told of a delivery that may begin."""
    terms = running.terms
    rate = running.rate_bytes_per_s
    leaves_as_body = is_body(terms.path, terms.transport != TCP)
    return DeliveryAccepted(
        delivery=terms.delivery.value,
        chunk_count=terms.chunk_count,
        layer_bytes=terms.demand.layer_bytes,
        body_bytes=running.delivery.plan.payload_bytes if leaves_as_body else 0,
        rate_bytes_per_s=None if rate is None else round(rate),
        path=terms.path,
        transport=terms.transport,
        window_source=terms.window.source.value,
        content=running.content,
        directory_bytes=running.delivery.plan.directory_bytes,
    )


def content_of(infos: Sequence[ObjectInfo | None]) -> str:
    """A digest of these objects' ETags, in order: the same of the same versions."""
    etags = "\n".join(info.etag for info in infos if info is not None)
    return hashlib.sha256(etags.encode()).hexdigest()[:32]
