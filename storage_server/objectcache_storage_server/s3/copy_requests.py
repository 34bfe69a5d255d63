"""Requests that copy within the store. Quotas and limits see them as they see puts."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.messages.uploads import CompleteUpload
from objectcache_schemas.messages.writes import CopyObject, CopyPart, Stored
from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.accounts.in_flight import Flight
from objectcache_storage_server.accounts.stored_ledger import Reservation
from objectcache_storage_server.engines.base import CHECKSUM_BLOCK_BYTES, StagedPut
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.puts.counted_puts import counted_put
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.join_parts import complete_upload
from objectcache_storage_server.s3.upload_requests import count_part
from objectcache_storage_server.service import Service


async def copy_object(service: Service, request: CopyObject) -> Stored:
    """`CopyObject`: the copy."""
    bucket = await service.call(service.engine.bucket, request.bucket)
    source = await service.call(service.engine.stat, request.source_bucket, request.source_key)
    # Where the source changes in between, its ETag does, and nothing is copied.
    info = await _copied(
        service,
        bucket,
        request.identity,
        1,
        source.size_bytes,
        lambda _: _copy_object(service, request, bucket.layout),
    )
    return Stored(info=info)


async def copy_part(service: Service, request: CopyPart) -> Stored:
    """`CopyPart`: the part."""
    upload = multipart.UploadName(request.bucket, request.key, request.upload_id)
    bucket = await service.call(service.engine.bucket, request.bucket)

    def copy(reservation: Reservation) -> ObjectInfo:
        info = multipart.copy_part(service.engine, request)
        count_part(service, upload, request.part_number, reservation)
        return info

    info = await _copied(service, bucket, request.identity, 0, request.length_bytes, copy)
    return Stored(info=info)


async def _copied(
    service: Service,
    bucket: BucketInfo,
    identity: str,
    object_count: int,
    size_bytes: int,
    copy: Callable[[Reservation], ObjectInfo],
) -> ObjectInfo:
    """What `copy` stored, which is called in a worker thread once there is room for it."""
    bytes_max = service.limits.object_bytes_max
    if size_bytes > bytes_max:
        raise InvalidRequest(
            f"the copy would have {size_bytes} bytes, limits.object_bytes_max is {bytes_max}; "
            "copy ranges of it into the parts of an upload",
            code="InvalidRequest",
        )
    async with (
        counted_put(service, bucket, identity, object_count, size_bytes) as counted,
        service.put_admitted(size_bytes, identity),
    ):
        return await service.call(copy, counted.reservation)


def _copy_object(service: Service, request: CopyObject, layout: KvLayout | None) -> ObjectInfo:
    engine = service.engine
    block_bytes = (
        slice_block_bytes(layout.per_layer_chunk_bytes) if layout else CHECKSUM_BLOCK_BYTES
    )
    staged = engine.stage(request.bucket, request.key, block_bytes)
    try:
        engine.copy(
            request.source_bucket, request.source_key, staged, source_etag=request.source_etag
        )
        put = StagedPut(staged, request.etag, request.attributes)
        return engine.commit([put], request.condition)[0].info
    finally:
        staged.discard()


async def complete(service: Service, request: CompleteUpload) -> Stored:
    """`CompleteUpload`: the object."""
    bucket = await service.call(service.engine.bucket, request.bucket)
    async with service.in_flight.flight(request.identity, bucket.name, service.call) as flight:
        info = await service.call(_complete, service, request, bucket, flight)
    return Stored(info=info)


def _complete(
    service: Service, request: CompleteUpload, bucket: BucketInfo, flight: Flight
) -> ObjectInfo:
    """The upload and its parts become the object: what they count for, it counts for."""

    def judge() -> None:
        with service.stored.reserving(bucket, 0, 0):
            pass  # a quota may have been lowered since the parts came

    @contextmanager
    def copying(size_bytes: int) -> Generator[None]:
        # Its parts were let in each for itself, so the whole is not refused for its size.
        flight.add_unknown(size_bytes)
        slot_bytes_max = min(service.limits.object_bytes_max, service.put_bytes_max)
        with service.put_admitted_now(min(size_bytes, slot_bytes_max), request.identity):
            yield

    bytes_max = service.limits.joined_object_bytes_max
    info = complete_upload(service.engine, request, bytes_max, judge, copying)
    service.stored.upload_ended(request.upload_id, is_joined=True)
    return info
