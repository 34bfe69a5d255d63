"""Puts of prefixes: all chunks of a descriptor, visible together."""

from __future__ import annotations

from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.messages.kv import KvPut, KvStored
from objectcache_schemas.records import Condition
from objectcache_storage_server.admission.gates import AdmittedPut
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.counts.storage_counts import EXISTING, STORED
from objectcache_storage_server.engines.base import PrefixShape, StagedPrefix, StagedPut
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.puts.encoded_payload import EncodedPayload
from objectcache_storage_server.puts.fabric_source import FabricSource
from objectcache_storage_server.puts.put_means import PutMeans
from objectcache_storage_server.puts.receive_data import Receiver, receive_all
from objectcache_storage_server.puts.target_source import MappedSource, PayloadSink, TargetSource
from objectcache_storage_server.transports.fabrics import FABRICS, check_transport


async def serve_kv_put(means: PutMeans, talk: Conversation, request: KvPut) -> None:
    """`KvPut`: all chunks of a descriptor, visible together."""
    descriptor = Descriptor.from_bytes(request.descriptor, means.settings.limits, of_put=True)
    _check_descriptor(means, descriptor)
    bucket = await means.calls.call(means.calls.engine.bucket, request.bucket)
    if bucket.layout is not None:
        descriptor.check_layout(bucket.layout)
    shape = PrefixShape(
        descriptor.chunk_keys,
        descriptor.num_layers,
        descriptor.per_layer_chunk_bytes,
        layerwise=descriptor.delivery is DeliveryMode.LAYERWISE,
        parent_key=descriptor.parent_key,
        encoded_bytes=descriptor.encoded_bytes,
    )
    await means.calls.call(means.calls.engine.check_room, shape.total_bytes)
    chunk_count = len(shape.keys)
    async with means.gates.put(
        bucket, request.identity, chunk_count, shape.total_bytes, shape.total_bytes, talk.gone
    ) as admitted:
        await _store_chunks(means, talk, request, descriptor, shape, admitted)


async def _store_chunks(
    means: PutMeans,
    talk: Conversation,
    request: KvPut,
    descriptor: Descriptor,
    shape: PrefixShape,
    admitted: AdmittedPut,
) -> None:
    """Take the payload and commit it."""
    prefix: StagedPrefix | None = None
    source: TargetSource | None = None
    try:
        if descriptor.rdma_target is not None:
            source = await _open_source(
                means, talk, request.identity, descriptor.rdma_target, shape
            )
        prefix = await means.calls.call(means.calls.engine.stage_prefix, request.bucket, shape)
        sink: PayloadSink = prefix
        if shape.encoded_bytes is not None:
            sink = EncodedPayload(prefix, shape, copies=isinstance(source, MappedSource))
        if source is not None:
            await source.write_all(talk, sink)
        elif not await _receive_prefix(means, talk, request.identity, sink, shape):
            return
        await admitted.confirm(shape.total_bytes)
        puts = [StagedPut(staged, "") for staged in prefix.staged]
        committed = await means.calls.call(
            means.calls.engine.commit, puts, Condition(immutable=True)
        )
        existing = sum(one.existed for one in committed)
        means.counts.put_chunks.add(EXISTING, existing)
        means.counts.put_chunks.add(STORED, len(committed) - existing)
        if shape.encoded_bytes is not None:
            means.counts.encoded_puts.add(means.counts.buckets[request.bucket])
        await talk.send(KvStored(stored=len(committed) - existing, existing=existing))
    finally:
        if source is not None:
            source.close()
        if prefix is not None:
            await means.calls.call(prefix.discard)


async def _open_source(
    means: PutMeans,
    talk: Conversation,
    identity: str,
    asked: MemoryTarget,
    shape: PrefixShape,
) -> TargetSource:
    """Raises `Unsupported` for a transport that there is none of, and as each source does."""
    check_transport(asked.transport)
    if asked.transport in FABRICS:
        return await FabricSource.open(means, talk, identity, asked, shape)
    return MappedSource(means, identity, asked, shape)


async def _receive_prefix(
    means: PutMeans, talk: Conversation, tenant: str, sink: PayloadSink, shape: PrefixShape
) -> bool:
    """Take the payload from the gateway; false where it aborted."""
    if isinstance(sink, EncodedPayload):  # whose frames begin at any byte
        receiver = Receiver(means, sink.write, 1, tenant, kept_bytes=sink.held_bytes_max)
    else:
        receiver = Receiver(means, sink.write, slice_block_bytes(shape.slice_bytes), tenant)
    return await receive_all(talk, receiver, shape.wire_bytes, shape.wire_bytes) is not None


def _check_descriptor(means: PutMeans, descriptor: Descriptor) -> None:
    if descriptor.delivery is DeliveryMode.AUTO:
        raise InvalidRequest(
            "delivery must be layerwise or chunkwise in a put: it names the payload's order",
            code="InvalidDescriptor",
        )
    if descriptor.layers is not None:
        raise InvalidRequest(
            "layers must be nil in a put: whole chunks are stored", code="InvalidDescriptor"
        )
    if len(descriptor.chunk_keys) > means.settings.limits.put_chunks_max:
        raise InvalidRequest(
            f"chunk_keys names {len(descriptor.chunk_keys)} chunks, "
            f"limits.put_chunks_max is {means.settings.limits.put_chunks_max}",
            code="DescriptorTooLarge",
        )
    if len(set(descriptor.chunk_keys)) < len(descriptor.chunk_keys):
        raise InvalidRequest("chunk_keys names a chunk twice", code="InvalidDescriptor")
    if descriptor.parent_key in descriptor.chunk_keys:
        raise InvalidRequest(
            "parent_key must not be one of chunk_keys: it is the chunk before the first of them",
            code="InvalidDescriptor",
        )
    if descriptor.chunk_bytes > means.settings.limits.object_bytes_max:
        raise InvalidRequest(
            f"a chunk would hold {descriptor.chunk_bytes} bytes, limits.object_bytes_max is "
            f"{means.settings.limits.object_bytes_max}",
            code="EntityTooLarge",
        )
