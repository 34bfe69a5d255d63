"""Gets of plain objects: at once where one is small and at hand, otherwise as a delivery."""

from __future__ import annotations

import time
from contextlib import ExitStack

from objectcache_schemas.compute_windows import WindowSource
from objectcache_schemas.delivery_paths import DeliveryPath
from objectcache_schemas.descriptor import DeliveryMode
from objectcache_schemas.errors import InvalidRequest, NotFound
from objectcache_schemas.limits import KIB
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.reads import ObjectOpened, OpenObject, SendBody
from objectcache_schemas.records import ObjectInfo
from objectcache_storage_server.admission.gates import AdmittedGet, BodyMemory
from objectcache_storage_server.admission.holders import get_holder
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.deliveries.body_gets import receive_choice, send_body, start_body
from objectcache_storage_server.deliveries.delivery_path import TCP
from objectcache_storage_server.deliveries.delivery_records import new_recorder, recorded
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.plan import RangePlan
from objectcache_storage_server.deliveries.running_delivery import BodyDelivery, DeliveryTerms
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.tracing.recorder import DeliveryRecorder

BODY_BYTES_MAX = 64 * KIB  # whatever a gateway asks for; more is sent from a buffer of the pool


async def serve_object(means: GetMeans, talk: Conversation, request: OpenObject) -> None:
    """`OpenObject`, then the range that the gateway chose. The object's size, looked up before,
    says whether it is one of its tenant's small gets; it stays so where the object is replaced
    while it waits.
    """
    recorder = new_recorder(means, request)
    size_bytes = await _size_bytes(means, request)
    holder = get_holder(request.identity, is_small=means.gates.is_small(size_bytes))
    async with means.gates.entrance.admitted(holder, talk.gone) as waited_s:
        recorder.queued(waited_s)
        small = open_small(means, request, recorder, size_bytes)
        if small is not None:
            await talk.send(small)
            return
        opened, info = await _open(means, request)
        await _serve_opened(means, talk, request, recorder, holder, opened, info)


async def _size_bytes(means: GetMeans, request: OpenObject) -> int:
    """The object's size, for which nothing is held. Raises `NotFound`."""
    calls = means.calls
    info = calls.engine.stat_at_hand(request.bucket, request.key)
    if info is None:
        info = await calls.call(calls.engine.stat, request.bucket, request.key)
    return info.size_bytes


async def _open(means: GetMeans, request: OpenObject) -> tuple[OpenObjects, ObjectInfo]:
    """An object that is not read at once. Raises `NotFound`."""
    opened = await means.calls.call_to_open(
        lambda: means.calls.engine.open_many(request.bucket, [request.key]), OpenObjects.close
    )
    info = opened.infos[0]
    if info is None:
        opened.close()
        raise NotFound(f"{request.key!r} is not stored", key=request.key)
    return opened, info


async def _serve_opened(
    means: GetMeans,
    talk: Conversation,
    request: OpenObject,
    recorder: DeliveryRecorder,
    holder: str,
    opened: OpenObjects,
    info: ObjectInfo,
) -> None:
    """Memory for it, and what the gateway chooses of it. `holder` has the turn. Takes `opened`
    over, whether it succeeds or not.
    """
    gates, tenant = means.gates, request.identity
    with ExitStack() as undo:
        undo.callback(opened.close)
        async with gates.flight(tenant, request.bucket) as flight:
            admitted = AdmittedGet(gates, holder, talk.gone, flight, recorder.queued)
            # Memory comes first: once the gateway knows the object it begins to answer.
            fragment_bytes = means.schedule.fragment_bytes(gates.pool.buffer_bytes, 0)
            memory = await admitted.body_memory(info.size_bytes, fragment_bytes)
            undo.callback(memory.release)
            await talk.send(ObjectOpened(info=info))
            choice = await receive_choice(talk, memory)
            if not isinstance(choice, SendBody):
                undo.close()
                await talk.send(Done())
                return
            admitted.begins(choice.length_bytes)
            undo.pop_all()  # the delivery takes them over
            with recorded(means, recorder):
                body = _start_range(means, opened, choice, recorder, tenant, fragment_bytes, memory)
                await send_body(means, talk, body, choice)


def _start_range(
    means: GetMeans,
    opened: OpenObjects,
    choice: SendBody,
    recorder: DeliveryRecorder,
    tenant: str,
    fragment_bytes: int,
    memory: BodyMemory,
) -> BodyDelivery:
    """Takes `opened` and the memory over, whether it succeeds or not."""
    with ExitStack() as undo:
        undo.callback(opened.close)
        undo.callback(memory.release)
        end_bytes = choice.offset_bytes + choice.length_bytes
        size_bytes = opened.infos[0].size_bytes if opened.infos[0] else 0
        if not 0 <= choice.offset_bytes <= end_bytes <= size_bytes:
            raise InvalidRequest("the range lies outside the object", code="InvalidRange")
        plan = RangePlan(
            opened.placements()[0], choice.offset_bytes, choice.length_bytes, fragment_bytes
        )
        demand = Demand(max(1, choice.length_bytes), None, 1, tenant=tenant)
        terms = DeliveryTerms(recorder, demand, means.schedule.policy)
        undo.pop_all()  # the delivery takes them over
    wish = means.gates.body_wish(choice.length_bytes, fragment_bytes)
    unused_bytes = memory.reserved.reserved_bytes - wish.wanted_bytes
    memory.reserved.shrink(max(0, unused_bytes))  # it may need less than all
    return start_body(means, plan, opened, terms, memory)


def open_small(
    means: GetMeans, request: OpenObject, recorder: DeliveryRecorder, size_bytes: int
) -> ObjectOpened | None:
    """The object with its body, which had so many bytes; None where it has to be opened.

    A read that does not wait is cheaper than handing it to another thread, so it is done in the
    event loop. It is a delivery all the same: admitted in its turn by the caller, and kept in the
    traces. Under a cap it is always opened, because its bytes are paced with all others. Raises
    `NotFound`.
    """
    size_bytes_max = min(request.body_bytes_max, BODY_BYTES_MAX)
    if not size_bytes_max or size_bytes > size_bytes_max or means.schedule.paces(request.identity):
        return None
    begun_s = time.monotonic()
    found = means.calls.engine.read_small(request.bucket, request.key, size_bytes_max)
    if found is None:
        return None
    info, body = found
    if body:  # as with other objects, nothing is delivered of an empty one
        _record(means, recorder, len(body), begun_s)
    return ObjectOpened(info=info, body=body)


def _record(means: GetMeans, recorder: DeliveryRecorder, size_bytes: int, begun_s: float) -> None:
    """The trace of a delivery that was one read."""
    now_s = time.monotonic()
    with recorded(means, recorder):
        recorder.accepted(
            path=DeliveryPath.S3TCP.value,
            transport=TCP,
            delivery=DeliveryMode.CHUNKWISE.value,
            policy=means.schedule.policy,
            chunk_count=1,
            payload_bytes=size_bytes,
            first_layer=0,
            end_layer=1,
            compute_window_s=None,
            window_source=WindowSource.NONE.value,
            rate_bytes_per_s=None,
            now_s=begun_s,
        )
        recorder.fragment_begun(0, begun_s)
        recorder.fragment_read(0, size_bytes, now_s - begun_s, now_s)
        recorder.layers_ready(1, now_s)
