"""Conversations that store bytes: one object, one part, or the chunks of a prefix."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable

from objectcache_schemas.descriptor import DeliveryMode, Descriptor, MemoryTarget
from objectcache_schemas.errors import Busy, InvalidRequest, ObjectCacheError
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.limits import MIB
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import KvPut, KvStored
from objectcache_schemas.messages.writes import CommitPut, PutObject, PutPart, SendData, Stored
from objectcache_schemas.records import Condition
from objectcache_storage_server.admission.client_pace import ClientPace
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.base import (
    CHECKSUM_BLOCK_BYTES,
    Committed,
    PrefixShape,
    StagedPrefix,
    StagedPut,
)
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.metrics.storage_counts import EXISTING, STORED
from objectcache_storage_server.puts.counted_puts import CountedPut, counted_put
from objectcache_storage_server.puts.fabric_source import FabricSource
from objectcache_storage_server.puts.target_source import MappedSource, TargetSource
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.upload_requests import count_part
from objectcache_storage_server.service import Service
from objectcache_storage_server.transports.fabrics import FABRICS, check_transport

BUFFER_BYTES = 2 * MIB  # of data received before it is written; two of them take turns


class Receiver:
    """Takes the data frames of a put and has them written, in order, in a worker thread.

    One buffer is received into while the other is written, so a put holds two buffers however
    large it is. Every buffer but the last holds whole blocks.
    """

    def __init__(
        self,
        service: Service,
        write: Callable[[int, memoryview], None],
        block_bytes: int,
        tenant: str,
    ) -> None:
        self._service = service
        self._write = write
        self._tenant = tenant
        buffer_bytes = max(block_bytes, BUFFER_BYTES // block_bytes * block_bytes)
        self._buffers = [memoryview(mmap.mmap(-1, buffer_bytes)) for _ in range(2)]
        self._filled_bytes = 0
        self._written_bytes = 0
        self._writing: asyncio.Future[None] | None = None
        self._error: ObjectCacheError | None = None

    async def receive(self, talk: Conversation, bytes_max: int) -> int:
        """Receive until the empty frame; returns the bytes. An engine's error is raised at the
        end, once the data was drained, so that the conversation stays in step.
        """
        total_bytes = 0
        pace = self._service.slow_puts.add(self._tenant)
        try:
            while (length_bytes := await pace.wait_for(talk.stream.receive_length())) > 0:
                total_bytes += length_bytes
                if total_bytes > bytes_max:
                    raise InvalidRequest(
                        f"the data is over {bytes_max} bytes", code="EntityTooLarge"
                    )
                await self._receive_frame(talk, pace, length_bytes)
            await self._flush()
            await self._written()
        finally:
            self._service.slow_puts.remove(pace)
            if self._writing is not None:
                await asyncio.wait([self._writing])
        if self._error is not None:
            raise self._error
        return total_bytes

    async def _receive_frame(self, talk: Conversation, pace: ClientPace, length_bytes: int) -> None:
        while length_bytes:
            room = self._buffers[0][self._filled_bytes :][:length_bytes]
            await pace.wait_for(talk.stream.receive_into(room))
            pace.moved(len(room))
            self._filled_bytes += len(room)
            length_bytes -= len(room)
            if self._filled_bytes == len(self._buffers[0]):
                await self._flush()

    async def _flush(self) -> None:
        """Hand the filled buffer to a writer, once the one before is through."""
        await self._written()
        if self._filled_bytes and self._error is None:
            data = self._buffers[0][: self._filled_bytes]
            call = self._service.call(self._write, self._written_bytes, data)
            self._writing = asyncio.ensure_future(call)
        self._written_bytes += self._filled_bytes
        self._filled_bytes = 0
        self._buffers.reverse()

    async def _written(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                await writing
            except ObjectCacheError as error:
                self._error = error


async def serve_put_object(service: Service, talk: Conversation, request: PutObject) -> None:
    """`PutObject`: one object."""
    bucket = await service.call(service.engine.bucket, request.bucket)
    _check_size(bucket.layout, request.size_bytes)
    async with counted_put(service, bucket, request.identity, 1, request.size_bytes) as counted:
        committed = await _serve_put(
            service,
            talk,
            request.bucket,
            request.key,
            request.size_bytes,
            bucket.layout,
            request.condition,
            counted,
            request.identity,
            _whole(request),
        )
    if committed is not None:
        await talk.send(Stored(info=committed.info))


async def serve_put_part(service: Service, talk: Conversation, request: PutPart) -> None:
    """`PutPart`: one part of an upload, an object of the storage server's own bucket."""
    upload = multipart.UploadName(request.bucket, request.key, request.upload_id)
    await service.call(multipart.check_upload, service.engine, upload)
    bucket = await service.call(service.engine.bucket, request.bucket)
    key = multipart.part_key(request.upload_id, request.part_number)
    async with counted_put(service, bucket, request.identity, 0, request.size_bytes) as counted:
        committed = await _serve_put(
            service,
            talk,
            multipart.BUCKET,
            key,
            request.size_bytes,
            None,
            Condition(),
            counted,
            request.identity,
        )
        if committed is not None:
            part = upload, request.part_number, counted.reservation
            await service.call(count_part, service, *part)
    if committed is not None:
        await talk.send(Stored(info=committed.info))


async def _serve_put(
    service: Service,
    talk: Conversation,
    bucket: str,
    key: str,
    size_bytes: int | None,
    layout: KvLayout | None,
    condition: Condition,
    counted: CountedPut,
    identity: str,
    whole: tuple[bytes, CommitPut] | None = None,
) -> Committed | None:
    """Receive one object, unless it is there as a `whole`, and commit it; None where the gateway
    aborted.
    """
    # A put of unknown length is counted as the largest it may become.
    unknown_max = min(service.limits.object_bytes_max, service.put_bytes_max)
    bytes_max = unknown_max if size_bytes is None else size_bytes
    if bytes_max > service.limits.object_bytes_max:
        raise InvalidRequest(
            f"the object has {bytes_max} bytes, limits.object_bytes_max is "
            f"{service.limits.object_bytes_max}",
            code="EntityTooLarge",
        )
    block_bytes = (
        slice_block_bytes(layout.per_layer_chunk_bytes) if layout else CHECKSUM_BLOCK_BYTES
    )
    if whole is not None:
        async with service.put_admitted(bytes_max, identity, talk.gone):
            await counted.confirm(bytes_max)
            return await service.call(
                _store, service, bucket, key, block_bytes, whole[0], whole[1], condition
            )
    if size_bytes is not None:
        await service.call(service.engine.check_room, size_bytes)
    async with service.put_admitted(bytes_max, identity, talk.gone):
        staged = await service.call(service.engine.stage, bucket, key, block_bytes)
        try:
            receiver = Receiver(service, staged.write_at, block_bytes, identity)
            end = await _receive_all(talk, receiver, size_bytes, bytes_max)
            if end is None:
                return None
            received_bytes, commit = end
            _check_size(layout, received_bytes)
            await counted.confirm(received_bytes)
            put = StagedPut(staged, commit.etag, commit.attributes)
            return (await service.call(service.engine.commit, [put], condition))[0]
        finally:
            await service.call(staged.discard)


def _whole(request: PutObject) -> tuple[bytes, CommitPut] | None:
    """The data and the commit, where both came with the request. Raises `InvalidRequest`."""
    if request.data is None or request.commit is None:
        return None
    if request.size_bytes != len(request.data):
        raise InvalidRequest(
            f"the put has {len(request.data)} bytes of data, size_bytes is {request.size_bytes}",
            code="IncompleteBody",
        )
    return request.data, request.commit


def _store(
    service: Service,
    bucket: str,
    key: str,
    block_bytes: int,
    data: bytes,
    commit: CommitPut,
    condition: Condition,
) -> Committed:
    """A whole put, in one call of a worker thread: a call for each step costs more than they do."""
    engine = service.engine
    engine.check_room(len(data))
    staged = engine.stage(bucket, key, block_bytes)
    try:
        if data:
            staged.write_at(0, memoryview(data))
        return engine.commit([StagedPut(staged, commit.etag, commit.attributes)], condition)[0]
    finally:
        staged.discard()


async def _receive_all(
    talk: Conversation, receiver: Receiver, total_bytes: int | None, bytes_max: int
) -> tuple[int, CommitPut] | None:
    """Take the data and how it ends; None where the gateway aborted, which is acknowledged."""
    await talk.send(SendData())
    error: ObjectCacheError | None = None
    received_bytes = 0
    try:
        received_bytes = await receiver.receive(talk, bytes_max)
    except (InvalidRequest, Busy):
        talk.give_up()  # data beyond the limit, or of a client that is too slow, is under way
        raise
    except ObjectCacheError as caught:
        error = caught
    end = await talk.receive_put_end()
    if not isinstance(end, CommitPut):
        await talk.send(Done())
        return None
    if error is not None:
        raise error
    if total_bytes is not None and received_bytes != total_bytes:
        raise InvalidRequest(
            f"the data ended after {received_bytes} of {total_bytes} bytes",
            code="IncompleteBody",
        )
    return received_bytes, end


async def serve_kv_put(service: Service, talk: Conversation, request: KvPut) -> None:
    """`KvPut`: all chunks of a descriptor, visible together."""
    descriptor = Descriptor.from_bytes(request.descriptor, service.limits, of_put=True)
    _check_put(service, descriptor)
    bucket = await service.call(service.engine.bucket, request.bucket)
    if bucket.layout is not None:
        descriptor.check_layout(bucket.layout)
    shape = PrefixShape(
        descriptor.chunk_keys,
        descriptor.num_layers,
        descriptor.per_layer_chunk_bytes,
        layerwise=descriptor.delivery is DeliveryMode.LAYERWISE,
        parent_key=descriptor.parent_key,
    )
    await service.call(service.engine.check_room, shape.total_bytes)
    chunk_count = len(shape.keys)
    async with (
        counted_put(service, bucket, request.identity, chunk_count, shape.total_bytes) as counted,
        service.put_admitted(shape.total_bytes, request.identity, talk.gone),
    ):
        await _store_chunks(service, talk, request, descriptor, shape, counted)


async def _store_chunks(
    service: Service,
    talk: Conversation,
    request: KvPut,
    descriptor: Descriptor,
    shape: PrefixShape,
    counted: CountedPut,
) -> None:
    """Take the payload and commit it."""
    prefix: StagedPrefix | None = None
    source: TargetSource | None = None
    try:
        if descriptor.rdma_target is not None:
            source = await _open_source(
                service, talk, request.identity, descriptor.rdma_target, shape
            )
        prefix = await service.call(service.engine.stage_prefix, request.bucket, shape)
        if source is not None:
            await source.write_all(talk, prefix)
        elif not await _receive_prefix(service, talk, request.identity, prefix, shape):
            return
        await counted.confirm(shape.total_bytes)
        puts = [StagedPut(staged, "") for staged in prefix.staged]
        committed = await service.call(service.engine.commit, puts, Condition(immutable=True))
        existing = sum(one.existed for one in committed)
        service.counts.put_chunks.add(EXISTING, existing)
        service.counts.put_chunks.add(STORED, len(committed) - existing)
        await talk.send(KvStored(stored=len(committed) - existing, existing=existing))
    finally:
        if source is not None:
            source.close()
        if prefix is not None:
            await service.call(prefix.discard)


async def _open_source(
    service: Service,
    talk: Conversation,
    identity: str,
    asked: MemoryTarget,
    shape: PrefixShape,
) -> TargetSource:
    """Raises `Unsupported` for a transport that there is none of, and as each source does."""
    check_transport(asked.transport)
    if asked.transport in FABRICS:
        return await FabricSource.open(service, talk, identity, asked, shape)
    return MappedSource(service, identity, asked, shape)


async def _receive_prefix(
    service: Service, talk: Conversation, tenant: str, prefix: StagedPrefix, shape: PrefixShape
) -> bool:
    """Take the payload from the gateway; false where it aborted."""
    receiver = Receiver(service, prefix.write, slice_block_bytes(shape.slice_bytes), tenant)
    return await _receive_all(talk, receiver, shape.total_bytes, shape.total_bytes) is not None


def _check_put(service: Service, descriptor: Descriptor) -> None:
    if descriptor.delivery is DeliveryMode.AUTO:
        raise InvalidRequest(
            "delivery must be layerwise or chunkwise in a put: it names the payload's order",
            code="InvalidDescriptor",
        )
    if descriptor.layers is not None:
        raise InvalidRequest(
            "layers must be nil in a put: whole chunks are stored", code="InvalidDescriptor"
        )
    if len(descriptor.chunk_keys) > service.limits.put_chunks_max:
        raise InvalidRequest(
            f"chunk_keys names {len(descriptor.chunk_keys)} chunks, "
            f"limits.put_chunks_max is {service.limits.put_chunks_max}",
            code="DescriptorTooLarge",
        )
    if len(set(descriptor.chunk_keys)) < len(descriptor.chunk_keys):
        raise InvalidRequest("chunk_keys names a chunk twice", code="InvalidDescriptor")
    if descriptor.parent_key in descriptor.chunk_keys:
        raise InvalidRequest(
            "parent_key must not be one of chunk_keys: it is the chunk before the first of them",
            code="InvalidDescriptor",
        )
    if descriptor.chunk_bytes > service.limits.object_bytes_max:
        raise InvalidRequest(
            f"a chunk would hold {descriptor.chunk_bytes} bytes, limits.object_bytes_max is "
            f"{service.limits.object_bytes_max}",
            code="EntityTooLarge",
        )


def _check_size(layout: KvLayout | None, size_bytes: int | None) -> None:
    if layout is not None and size_bytes not in (None, layout.chunk_bytes):
        raise InvalidRequest(
            f"the object has {size_bytes} bytes, chunks of this bucket's KV layout have "
            f"{layout.chunk_bytes}",
            code="DescriptorMismatch",
        )
