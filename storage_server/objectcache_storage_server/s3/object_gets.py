"""Gets of plain objects: at once where one is small and at hand, otherwise as a delivery."""

from __future__ import annotations

from contextlib import ExitStack

from objectcache_schemas.errors import InvalidRequest, NotFound
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.reads import ObjectOpened, OpenObject, SendBody
from objectcache_storage_server.admission.gates import AdmittedGet, BodyMemory
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.deliveries.body_gets import receive_choice, send_body, start_body
from objectcache_storage_server.deliveries.delivery_records import new_recorder, recorded
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.plan import RangePlan
from objectcache_storage_server.deliveries.running_delivery import BodyDelivery, DeliveryTerms
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.s3.small_gets import open_small
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.tracing.recorder import DeliveryRecorder


async def serve_object(means: GetMeans, talk: Conversation, request: OpenObject) -> None:
    """`OpenObject`, then the range that the gateway chose."""
    recorder = new_recorder(means, request)
    gates, tenant = means.gates, request.identity
    async with gates.entrance.admitted(tenant, talk.gone) as waited_s:
        recorder.queued(waited_s)
        small = open_small(means, request, recorder)
        if small is not None:
            await talk.send(small)
            return
        async with gates.get_of_object(
            tenant, request.bucket, talk.gone, recorder.queued
        ) as admitted:
            await _serve_large(means, talk, request, recorder, admitted)


async def _serve_large(
    means: GetMeans,
    talk: Conversation,
    request: OpenObject,
    recorder: DeliveryRecorder,
    admitted: AdmittedGet,
) -> None:
    """An object that is not read at once."""
    opened = await means.calls.call_to_open(
        lambda: means.calls.engine.open_many(request.bucket, [request.key]), OpenObjects.close
    )
    with ExitStack() as undo:
        undo.callback(opened.close)
        info = opened.infos[0]
        if info is None:
            raise NotFound(f"{request.key!r} is not stored", key=request.key)
        # Memory comes first: once the gateway knows the object it begins to answer.
        fragment_bytes = means.schedule.fragment_bytes(means.settings.storage.fragment_bytes, 0)
        memory = await admitted.body_memory(info.size_bytes, fragment_bytes)
        undo.callback(memory.release)
        await talk.send(ObjectOpened(info=info))
        choice = await receive_choice(talk, memory)
        if isinstance(choice, SendBody):
            undo.pop_all()  # the delivery takes them over
    if not isinstance(choice, SendBody):
        await talk.send(Done())
        return
    with recorded(means, recorder):
        body = _start_range(
            means, opened, choice, recorder, request.identity, fragment_bytes, memory
        )
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
