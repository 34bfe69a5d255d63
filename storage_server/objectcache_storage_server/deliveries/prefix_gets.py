"""Gets of prefixes, whoever asks for them: a gateway for its client, or a client's session."""

from __future__ import annotations

import math

from objectcache_runtime.buffers import ReservedMemory
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.messages.kv import KvGet
from objectcache_storage_server.admission.gates import BodyMemory
from objectcache_storage_server.conversations.conversation import Asker, Conversation
from objectcache_storage_server.deliveries.body_gets import serve_body, start_body
from objectcache_storage_server.deliveries.delivery_path import AskedGet, choose_mode
from objectcache_storage_server.deliveries.delivery_records import new_recorder, recorded
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.open_prefix import open_prefix
from objectcache_storage_server.deliveries.plan import (
    ChunkPlan,
    plan_chunks,
    target_fragment_bytes,
)
from objectcache_storage_server.deliveries.running_delivery import DeliveryTerms
from objectcache_storage_server.deliveries.target_gets import serve_target, start_target
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.windows.find_windows import Window
from objectcache_storage_server.tracing.recorder import DeliveryRecorder


async def serve_kv_get(means: GetMeans, talk: Conversation, request: KvGet) -> None:
    """`KvGet`: plan the delivery, say so, and carry it to its end."""
    descriptor = Descriptor.from_bytes(request.descriptor, means.settings.limits)
    await serve_get(means, talk, request, descriptor)


async def serve_get(means: GetMeans, asker: Asker, request: KvGet, descriptor: Descriptor) -> None:
    """A get, whoever brought it; what goes into a body is asked for in a `Conversation`."""
    asked = AskedGet.of(request.path, descriptor)
    recorder = new_recorder(means, request)
    with recorded(means, recorder):
        async with means.gates.get(
            request.identity, request.bucket, asker.gone, recorder.queued
        ) as admitted:
            opened, window = await means.calls.call_to_open(
                lambda: open_prefix(means, request, descriptor), lambda found: found[0].close()
            )
            memory: BodyMemory | ReservedMemory | None
            try:
                plan, terms = _plan(means, opened, descriptor, asked, request, recorder, window)
                if asked.is_body:
                    memory = await admitted.body_memory(plan.payload_bytes, plan.fragment_bytes)
                else:
                    memory = await admitted.target_memory(
                        plan.payload_bytes, is_staged=asked.is_staged
                    )
            except BaseException:
                opened.close()
                raise
            if isinstance(memory, BodyMemory):
                assert isinstance(asker, Conversation), "a session asks for targets alone"
                body = start_body(means, plan, opened, terms, memory)
                await serve_body(means, asker, body)
            else:
                running = start_target(means, plan, opened, request, descriptor, terms, memory)
                await serve_target(means, asker, running)


def _plan(
    means: GetMeans,
    opened: OpenObjects,
    descriptor: Descriptor,
    asked: AskedGet,
    request: KvGet,
    recorder: DeliveryRecorder,
    window: Window,
) -> tuple[ChunkPlan, DeliveryTerms]:
    """What will be delivered, and on which terms."""
    chunk_count = len(opened.infos)
    mode = choose_mode(
        asked.mode, descriptor.payload_bytes(chunk_count), means.schedule.layerwise_threshold_bytes
    )
    layer_bytes = chunk_count * descriptor.per_layer_chunk_bytes
    layer_count = descriptor.end_layer - descriptor.first_layer
    fragment_bytes = means.settings.storage.fragment_bytes
    if not asked.is_body:
        fragment_bytes_max = means.settings.storage.target_fragment_bytes_max
        if asked.is_staged:
            fragment_bytes_max = means.staging.buffer_bytes
        fragment_bytes = target_fragment_bytes(
            layer_bytes, means.schedule.reader_threads, fragment_bytes, fragment_bytes_max
        )
    rate_max = descriptor.rate_bytes_per_s or math.inf
    fragment_bytes = means.schedule.fragment_bytes(
        fragment_bytes, descriptor.per_layer_chunk_bytes, rate_max
    )
    plan = plan_chunks(descriptor, opened.placements(), mode, fragment_bytes)
    terms = DeliveryTerms(
        recorder,
        Demand(layer_bytes, window.compute_window_s, layer_count, tenant=request.identity),
        means.schedule.policy,
        window,
        asked.taken(mode, chunk_count),
        asked.transport,
        mode,
        chunk_count,
        rate_max,
    )
    return plan, terms
