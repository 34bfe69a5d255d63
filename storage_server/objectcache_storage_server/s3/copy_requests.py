"""Requests that copy within the store. Quotas and limits see them as they see puts."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.messages.uploads import CompleteUpload
from objectcache_schemas.messages.writes import CopyObject, CopyPart, Stored
from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.base import StagedPut, object_block_bytes
from objectcache_storage_server.puts.put_means import PutMeans
from objectcache_storage_server.quotas.in_flight import Flight
from objectcache_storage_server.quotas.stored_ledger import Reservation
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.join_parts import complete_upload
from objectcache_storage_server.s3.upload_requests import UploadMeans, count_part


async def copy_object(means: PutMeans, request: CopyObject) -> Stored:
    """`CopyObject`: the copy."""
    bucket = await means.calls.call(means.calls.engine.bucket, request.bucket)
    source = await means.calls.call(
        means.calls.engine.stat, request.source_bucket, request.source_key
    )
    # Where the source changes in between, its ETag does, and nothing is copied.
    info = await _copied(
        means,
        bucket,
        request.identity,
        1,
        source.size_bytes,
        lambda _: _copy_object(means, request, bucket.layout),
    )
    return Stored(info=info)


async def copy_part(means: UploadMeans, request: CopyPart) -> Stored:
    """`CopyPart`: the part."""
    upload = multipart.UploadName(request.bucket, request.key, request.upload_id)
    bucket = await means.calls.call(means.calls.engine.bucket, request.bucket)

    def copy(reservation: Reservation) -> ObjectInfo:
        info = multipart.copy_part(means.calls.engine, request)
        count_part(means, upload, request.part_number, reservation)
        return info

    info = await _copied(means.puts, bucket, request.identity, 0, request.length_bytes, copy)
    return Stored(info=info)


async def _copied(
    means: PutMeans,
    bucket: BucketInfo,
    identity: str,
    object_count: int,
    size_bytes: int,
    copy: Callable[[Reservation], ObjectInfo],
) -> ObjectInfo:
    """What `copy` stored, which is called in a worker thread once there is room for it."""
    bytes_max = means.settings.limits.object_bytes_max
    if size_bytes > bytes_max:
        raise InvalidRequest(
            f"the copy would have {size_bytes} bytes, limits.object_bytes_max is {bytes_max}; "
            "copy ranges of it into the parts of an upload",
            code="InvalidRequest",
        )
    async with means.gates.put(bucket, identity, object_count, size_bytes, size_bytes) as admitted:
        return await means.calls.call(copy, admitted.reservation)


def _copy_object(means: PutMeans, request: CopyObject, layout: KvLayout | None) -> ObjectInfo:
    engine = means.calls.engine
    block_bytes = object_block_bytes(layout)
    staged = engine.stage(request.bucket, request.key, block_bytes)
    try:
        engine.copy(
            request.source_bucket, request.source_key, staged, source_etag=request.source_etag
        )
        put = StagedPut(staged, request.etag, request.attributes)
        return engine.commit([put], request.condition)[0].info
    finally:
        staged.discard()


async def complete(means: UploadMeans, request: CompleteUpload) -> Stored:
    """`CompleteUpload`: the object."""
    bucket = await means.calls.call(means.calls.engine.bucket, request.bucket)
    async with means.puts.gates.flight(request.identity, bucket.name) as flight:
        info = await means.calls.call(_complete, means, request, bucket, flight)
    return Stored(info=info)


def _complete(
    means: UploadMeans,
    request: CompleteUpload,
    bucket: BucketInfo,
    flight: Flight,
) -> ObjectInfo:
    """The upload and its parts become the object: what they count for, it counts for."""

    def judge() -> None:
        with means.stored.reserving(bucket, 0, 0):
            pass  # a quota may have been lowered since the parts came

    @contextmanager
    def copying(size_bytes: int) -> Generator[None]:
        # Its parts were let in each for itself, so the whole is not refused for its size.
        flight.add_unknown(size_bytes)
        slot_bytes_max = min(
            means.puts.settings.limits.object_bytes_max, means.puts.gates.slots.put_bytes_max
        )
        with means.puts.gates.put_now(min(size_bytes, slot_bytes_max), request.identity):
            yield

    bytes_max = means.puts.settings.limits.joined_object_bytes_max
    info = complete_upload(means.calls.engine, request, bytes_max, judge, copying)
    means.stored.upload_ended(request.upload_id, is_joined=True)
    return info
