"""Gets of prefixes, whoever asks for them: a gateway for its client, or a client's session."""

from __future__ import annotations

import math

from objectcache_runtime.buffers import ReservedMemory
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.messages.kv import KvGet
from objectcache_storage_server.admission.gates import BodyMemory
from objectcache_storage_server.conversations.conversation import Asker, Conversation
from objectcache_storage_server.deliveries.body_gets import serve_body, start_body
from objectcache_storage_server.deliveries.delivery_path import AskedGet, choose_mode
from objectcache_storage_server.deliveries.delivery_records import new_recorder, recorded
from objectcache_storage_server.deliveries.encoded.encoded_plan import EncodedPlan
from objectcache_storage_server.deliveries.encoded.framed_payload import (
    FramedPayload,
    framed_payload,
)
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
    recorder = new_recorder(means, request, descriptor.nic)
    payload_bytes_max = descriptor.payload_bytes(len(descriptor.chunk_keys))
    with recorded(means, recorder):
        async with means.gates.get(
            request.identity, request.bucket, payload_bytes_max, asker.gone, recorder.queued
        ) as admitted:
            opened, window, framed = await means.calls.call_to_open(
                lambda: _open(means, request, descriptor, asked), lambda found: found[0].close()
            )
            memory: BodyMemory | ReservedMemory | None
            try:
                plan, terms = _plan(
                    means, opened, framed, descriptor, asked, request, recorder, window
                )
                if asked.is_body:
                    memory = await admitted.body_memory(plan.payload_bytes, plan.fragment_bytes)
                    admitted.begins(plan.payload_bytes)
                else:
                    memory = await admitted.target_memory(
                        plan.payload_bytes, is_staged=asked.is_staged
                    )
            except BaseException:
                opened.close()
                raise
            opened = plan.reading(opened)
            if isinstance(memory, BodyMemory):
                assert isinstance(asker, Conversation), "a session asks for targets alone"
                body = start_body(means, plan, opened, terms, memory)
                await serve_body(means, asker, body)
            else:
                running = start_target(means, plan, opened, request, descriptor, terms, memory)
                await serve_target(means, asker, running)


def _open(
    means: GetMeans, request: KvGet, descriptor: Descriptor, asked: AskedGet
) -> tuple[OpenObjects, Window, FramedPayload | None]:
    """Open the chunks, and see what of them may be sent as frames: work for a thread, which grows
    with the runs and layers of a prefix.
    """
    opened, window = open_prefix(means, request, descriptor)
    if not asked.may_take_frames(descriptor):
        return opened, window, None
    try:
        framed = framed_payload(descriptor, opened.frames(), opened.placements())
        return opened, window, framed
    except BaseException:
        opened.close()
        raise


def _plan(
    means: GetMeans,
    opened: OpenObjects,
    framed: FramedPayload | None,
    descriptor: Descriptor,
    asked: AskedGet,
    request: KvGet,
    recorder: DeliveryRecorder,
    window: Window,
) -> tuple[ChunkPlan | EncodedPlan, DeliveryTerms]:
    """What will be delivered, and on which terms."""
    chunk_count = len(opened.infos)
    mode = choose_mode(
        asked.mode, descriptor.payload_bytes(chunk_count), means.schedule.layerwise_threshold_bytes
    )
    plan: ChunkPlan | EncodedPlan | None = None
    if framed is not None and mode is DeliveryMode.LAYERWISE:
        plan = _encoded_plan(means, opened, framed, descriptor, asked)
    if plan is None:
        slice_bytes = descriptor.per_layer_chunk_bytes
        fragment_bytes = _fragment_bytes(
            means, descriptor, asked, chunk_count * slice_bytes, slice_bytes
        )
        plan = plan_chunks(descriptor, opened.placements(), mode, fragment_bytes)
    layer_count = descriptor.end_layer - descriptor.first_layer
    layer_bytes, rest_bytes = divmod(plan.payload_bytes, layer_count)
    terms = DeliveryTerms(
        recorder,
        Demand(
            layer_bytes,
            window.compute_window_s,
            layer_count,
            tenant=request.identity,
            nic=descriptor.nic or "",
            rest_bytes=rest_bytes,
        ),
        means.schedule.policy,
        window,
        asked.taken(mode, chunk_count),
        asked.transport,
        mode,
        chunk_count,
        descriptor.rate_bytes_per_s or math.inf,
        descriptor.nic_bytes_per_s,
    )
    return plan, terms


def _encoded_plan(
    means: GetMeans,
    opened: OpenObjects,
    framed: FramedPayload,
    descriptor: Descriptor,
    asked: AskedGet,
) -> EncodedPlan | None:
    """The plan of a payload with frames in it; None where one is longer than a fragment, since
    frames are not sent in pieces, or a layer is longer than its place in a ring.
    """
    slice_bytes = max(framed.slice_bytes_max, descriptor.per_layer_chunk_bytes)
    fragment_bytes = _fragment_bytes(means, descriptor, asked, framed.layer_bytes, slice_bytes)
    if slice_bytes > fragment_bytes:
        return None
    plan = EncodedPlan(framed, opened.placements(), fragment_bytes)
    place_bytes = descriptor.ring_place_bytes
    return plan if place_bytes is None or max(plan.layers_bytes) <= place_bytes else None


def _fragment_bytes(
    means: GetMeans, descriptor: Descriptor, asked: AskedGet, layer_bytes: int, slice_bytes: int
) -> int:
    """The size of fragments for such layers, of slices or frames of `slice_bytes` at most."""
    fragment_bytes = means.settings.storage.fragment_bytes
    if not asked.is_body:
        fragment_bytes_max = means.settings.storage.target_fragment_bytes_max
        if asked.is_staged:
            fragment_bytes_max = means.staging.buffer_bytes
        fragment_bytes = target_fragment_bytes(
            layer_bytes,
            means.schedule.reader_threads,
            fragment_bytes,
            fragment_bytes_max,
            means.calls.engine.capabilities.read_bytes,
        )
    return means.schedule.fragment_bytes(
        fragment_bytes,
        slice_bytes,
        descriptor.rate_bytes_per_s or math.inf,
        descriptor.nic_bytes_per_s or math.inf,
    )
