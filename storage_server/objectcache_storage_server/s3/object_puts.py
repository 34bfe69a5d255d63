"""Puts of one object, or of one part of an upload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import CheckPut
from objectcache_schemas.messages.writes import CommitPut, PutObject, PutPart, Stored
from objectcache_schemas.records import BucketInfo, Condition
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.base import (
    Committed,
    Engine,
    StagedPut,
    object_block_bytes,
)
from objectcache_storage_server.puts.put_means import PutMeans
from objectcache_storage_server.puts.receive_data import Receiver, receive_all
from objectcache_storage_server.quotas.stored_ledger import Reservation
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.upload_requests import UploadMeans, count_part


@dataclass(frozen=True, slots=True)
class _ObjectPut:
    """What is to be stored where, and whom it counts for: `size_bytes` None is not known yet."""

    bucket: str
    key: str
    size_bytes: int | None
    tenant: str
    counts_in: BucketInfo
    object_count: int
    layout: KvLayout | None = None
    condition: Condition = Condition()  # noqa: RUF009 - frozen

    @property
    def block_bytes(self) -> int:
        """Bytes of a checksum block."""
        return object_block_bytes(self.layout)


async def serve_put_object(means: PutMeans, talk: Conversation, request: PutObject) -> None:
    """`PutObject`: one object."""
    bucket = await means.calls.call(means.calls.engine.bucket, request.bucket)
    _check_size(bucket.layout, request.size_bytes)
    put = _ObjectPut(
        request.bucket,
        request.key,
        request.size_bytes,
        request.identity,
        bucket,
        1,
        bucket.layout,
        request.condition,
    )
    await _serve_put(means, talk, put, _whole(request))


async def serve_put_part(means: UploadMeans, talk: Conversation, request: PutPart) -> None:
    """`PutPart`: one part of an upload, an object of the storage server's own bucket."""
    upload = multipart.UploadName(request.bucket, request.key, request.upload_id)
    await means.calls.call(multipart.check_upload, means.calls.engine, upload)
    bucket = await means.calls.call(means.calls.engine.bucket, request.bucket)
    key = multipart.part_key(request.upload_id, request.part_number)
    put = _ObjectPut(multipart.BUCKET, key, request.size_bytes, request.identity, bucket, 0)
    await _serve_put(
        means.puts,
        talk,
        put,
        then=lambda reservation: count_part(means, upload, request.part_number, reservation),
    )


async def check_put(means: PutMeans, request: CheckPut) -> Done:
    """`CheckPut`: raises what `Gates.counted` would."""
    bucket = await means.calls.call(means.calls.engine.bucket, request.bucket)
    async with means.gates.counted(bucket, request.identity, 1, request.size_bytes):
        return Done()


async def _serve_put(
    means: PutMeans,
    talk: Conversation,
    put: _ObjectPut,
    whole: tuple[bytes, CommitPut] | None = None,
    then: Callable[[Reservation], None] | None = None,
) -> None:
    """Receive one object, unless it is there as a `whole`, commit it, and say so; nothing is said
    where the gateway aborted. `then` is called in a worker thread while the put still counts.
    """
    call, engine = means.calls.call, means.calls.engine
    bytes_max = _bytes_max(means, put.size_bytes)
    if put.size_bytes is not None and whole is None:
        await call(engine.check_room, put.size_bytes)
    async with means.gates.put(
        put.counts_in, put.tenant, put.object_count, put.size_bytes, bytes_max, talk.gone
    ) as admitted:
        if whole is not None:
            await admitted.confirm(bytes_max)
            committed = await call(_store, engine, put, *whole)
        else:
            staged = await call(engine.stage, put.bucket, put.key, put.block_bytes)
            try:
                receiver = Receiver(means, staged.write_at, put.block_bytes, put.tenant)
                end = await receive_all(talk, receiver, put.size_bytes, bytes_max)
                if end is None:
                    return
                received_bytes, commit = end
                _check_size(put.layout, received_bytes)
                await admitted.confirm(received_bytes)
                made = StagedPut(staged, commit.etag, commit.attributes)
                committed = (await call(engine.commit, [made], put.condition))[0]
            finally:
                await call(staged.discard)
        if then is not None:
            await call(then, admitted.reservation)
    await talk.send(Stored(info=committed.info))


def _bytes_max(means: PutMeans, size_bytes: int | None) -> int:
    """What the put may have; one of unknown length counts as the largest that it may become.
    Raises `InvalidRequest` (EntityTooLarge).
    """
    object_bytes_max = means.settings.limits.object_bytes_max
    if size_bytes is None:
        return min(object_bytes_max, means.gates.slots.put_bytes_max)
    if size_bytes > object_bytes_max:
        raise InvalidRequest(
            f"the object has {size_bytes} bytes, limits.object_bytes_max is {object_bytes_max}",
            code="EntityTooLarge",
        )
    return size_bytes


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


def _store(engine: Engine, put: _ObjectPut, data: bytes, commit: CommitPut) -> Committed:
    """A whole put, in one call of a worker thread: a call for each step costs more than they do."""
    engine.check_room(len(data))
    staged = engine.stage(put.bucket, put.key, put.block_bytes)
    try:
        if data:
            staged.write_at(0, memoryview(data))
        made = StagedPut(staged, commit.etag, commit.attributes)
        return engine.commit([made], put.condition)[0]
    finally:
        staged.discard()


def _check_size(layout: KvLayout | None, size_bytes: int | None) -> None:
    if layout is not None and size_bytes not in (None, layout.chunk_bytes):
        raise InvalidRequest(
            f"the object has {size_bytes} bytes, chunks of this bucket's KV layout have "
            f"{layout.chunk_bytes}",
            code="DescriptorMismatch",
        )
