"""Deliveries straight into memory that a client has registered."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from functools import partial

from objectcache_fabrics.leased_memory import RemoteTargetMemory
from objectcache_fabrics.ring_room import RingRoom
from objectcache_runtime.buffers import ReservedMemory
from objectcache_runtime.first_of import end, first_done
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError
from objectcache_schemas.messages.kv import DeliveryEnded, KvGet, ReadPass
from objectcache_schemas.messages.sessions import PassGiven
from objectcache_storage_server.conversations.conversation import Asker
from objectcache_storage_server.deliveries.delivery import DeliveryState
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.plan import Plan
from objectcache_storage_server.deliveries.running_delivery import (
    DeliveryTerms,
    RunningDelivery,
    accepted,
    wait_admitted,
)
from objectcache_storage_server.deliveries.watch_consumption import ConsumptionWatch
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.scheduling.windows.find_windows import shape_of
from objectcache_storage_server.transports.base import Transport
from objectcache_storage_server.transports.ring_watch import RingWatch
from objectcache_storage_server.transports.shared_memory import SharedMemoryTransport
from objectcache_storage_server.transports.staged import StagedTransport
from objectcache_storage_server.transports.targets import TargetOwner


def start_target(
    means: GetMeans,
    plan: Plan,
    opened: OpenObjects,
    request: KvGet,
    descriptor: Descriptor,
    terms: DeliveryTerms,
    staging: ReservedMemory | None,
) -> RunningDelivery:
    """Begin reading straight into the client's registered memory, or, where a fabric reaches it,
    into `staging`, which is None otherwise.

    Takes `opened` and the memory over, whether it succeeds or not.
    """
    asked = descriptor.rdma_target
    assert asked is not None

    def broken(error: ObjectCacheError) -> None:
        running.delivery.fail(error)
        session.end()  # nothing more is written for it, so its client begins another one

    def wake() -> None:
        means.schedule.dispatcher.wake(running.delivery)

    with ExitStack() as undo:
        undo.callback(opened.close)
        if staging is not None:
            undo.callback(staging.release)
        ring = descriptor.target_ring(plan.layers_bytes)
        rows = ring or descriptor.target_rows(terms.chunk_count)
        room = None if ring is None else RingRoom(ring, plan.first_layer)
        lease = means.targets.lease(request.identity, asked, plan.payload_bytes, rows)
        undo.callback(lease.end)
        session = lease.target.owner
        transport: Transport
        if isinstance(lease.target.memory, RemoteTargetMemory):
            assert staging is not None
            transport = StagedTransport(
                lease,
                asked.tag,
                means.staging,
                staging,
                wake,
                broken,
                plan.first_layer,
                room,
            )
            transport.when_quiet(partial(lease.target.memory.peer.forget, asked.tag))
        else:
            transport = SharedMemoryTransport(lease, asked.tag, session.post, room)
        running = RunningDelivery(means, plan, opened, transport, terms)
        undo.pop_all()  # from here on the delivery lets them go
    try:
        lease.on_release(running.delivery.fail)
        chunk_count = descriptor.window_chunks(terms.chunk_count)
        shape = shape_of(descriptor, request.bucket, chunk_count)
        ConsumptionWatch(means, running, session, asked.tag, request.identity, shape)
        if room is not None:
            stall_timeout_s = means.settings.storage.send_stall_timeout_s
            watch = RingWatch(
                room, session, asked.tag, stall_timeout_s, wake, running.delivery.fail
            )
            running.after_end(watch.close)
        running.start()
    except BaseException:
        running.delivery.fail(DeliveryFailed("it could not be begun"))
        raise
    if request.read_pass is not None:
        _give_pass(means, session, request.bucket, request.read_pass)
    return running


def _give_pass(means: GetMeans, session: TargetOwner, bucket: str, given: ReadPass) -> None:
    """Let the session ask for the next deliveries itself, where the pass is good for it."""
    lives_s = session.passes.give(
        bucket, given, means.books.versions, time.monotonic(), means.settings.storage.session_pass_s
    )
    if lives_s:
        session.post(PassGiven(bucket=bucket, lives_s=lives_s))


async def serve_target(means: GetMeans, asker: Asker, running: RunningDelivery) -> None:
    """Say that it was accepted and, once nothing is written any more, how it ended."""
    try:
        await wait_admitted(means, asker, running)
    except BaseException:
        await running.cancel("it was not let in")
        raise
    watching = asyncio.ensure_future(asker.gone())
    ending = asyncio.ensure_future(running.ended.wait())
    timeout_s = means.settings.storage.delivery_timeout_s
    try:
        await asker.send(accepted(running))
        await first_done(ending, watching, timeout_s=timeout_s)
        if not ending.done() and not watching.done():
            await running.cancel(f"it took over {timeout_s:g} s (storage.delivery_timeout_s)")
    finally:
        try:
            await end(watching, ending)
        finally:
            await running.cancel("whoever asked is gone")
    ended = _ended(running)
    running.terms.recorder.ended(time.monotonic(), ended.error)
    await asker.send(ended)


def _ended(running: RunningDelivery) -> DeliveryEnded:
    delivery = running.delivery
    if running.transport.undelivered is not None:
        layer, failure = running.transport.undelivered
        return DeliveryEnded(payload_bytes=0, error=failure.to_wire(), failed_layer=layer)
    if delivery.state is DeliveryState.COMPLETE:
        return DeliveryEnded(payload_bytes=delivery.plan.payload_bytes)
    error = delivery.error
    assert isinstance(error, ObjectCacheError)
    return DeliveryEnded(payload_bytes=0, error=error.to_wire(), failed_layer=delivery.end_layer)
