"""Requests that take one answer: blocking functions over the engine."""

from __future__ import annotations

import math
import time

import msgspec

from objectcache_schemas.engine_status import EngineState, GetEngineStatus
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.messages import (
    AbortUpload,
    Bucket,
    Buckets,
    CompleteUpload,
    CopyObject,
    CopyPart,
    CreateBucket,
    CreateSession,
    CreateUpload,
    DeleteBucket,
    DeleteObjects,
    Done,
    GatewayRequest,
    GetBucket,
    GetHealth,
    KvMatch,
    ListBuckets,
    ListObjects,
    ListParts,
    ListUploads,
    Matched,
    Object,
    ObjectsPinned,
    PinObjects,
    SessionTicket,
    SetLayout,
    SetPolicy,
    StatObject,
    Stored,
    Upload,
)
from objectcache_schemas.records import BucketInfo, BucketPolicy
from objectcache_schemas.schedule import GetSchedule, SetSchedule
from objectcache_schemas.traces import GetTraces
from objectcache_storage_server import multipart
from objectcache_storage_server.engines.base import CHECKSUM_BLOCK_BYTES, Engine, StagedPut
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.bucket_rules import no_such_bucket
from objectcache_storage_server.listing import list_objects
from objectcache_storage_server.service import Service
from objectcache_storage_server.tickets import TICKET_LIFE_S


def answer(service: Service, request: GatewayRequest) -> msgspec.Struct:
    """The reply to a simple request. Raises what the engine raises."""
    engine = service.engine
    match request:
        case GetHealth():
            return service.health()
        case CreateBucket():
            engine.create_bucket(
                BucketInfo(
                    name=request.name,
                    owner=request.owner,
                    region=request.region,
                    created_s=time.time(),
                )
            )
            return Done()
        case GetBucket():
            return Bucket(info=engine.bucket(request.name))
        case ListBuckets():
            return Buckets(buckets=tuple(engine.buckets()))
        case DeleteBucket():
            engine.delete_bucket(request.name)
            multipart.forget_uploads(engine, request.name)
            return Done()
        case SetLayout():
            slice_block_bytes(request.layout.per_layer_chunk_bytes)
            engine.set_layout(request.bucket, request.layout)
            return Done()
        case StatObject():
            return Object(info=engine.stat(request.bucket, request.key))
        case ListObjects():
            return list_objects(
                request,
                lambda prefix, after, limit: engine.scan(request.bucket, prefix, after, limit),
            )
        case CopyObject():
            return _copy_object(service, request)
        case DeleteObjects():
            engine.delete(request.bucket, request.keys)
            return Done()
        case KvMatch():
            return Matched(matched=engine.match(request.bucket, request.chunk_keys))
        case CreateSession():
            return _create_session(service, request)
        case GetEngineStatus() | SetPolicy() | PinObjects():
            return _answer_operator(engine, request)
        case GetSchedule():
            return service.schedule_state()
        case SetSchedule():
            return service.change_schedule(request)
        case GetTraces():
            return service.traces.answer(request, time.monotonic())
        case _:
            return _answer_multipart(service, request)


def _answer_operator(
    engine: Engine, request: GetEngineStatus | SetPolicy | PinObjects
) -> msgspec.Struct:
    match request:
        case GetEngineStatus():
            return EngineState(status=engine.status())
        case SetPolicy():
            _check_not_hidden(request.bucket)
            _check_policy(request.policy)
            engine.set_policy(request.bucket, request.policy)
            return Done()
        case PinObjects():
            _check_not_hidden(request.bucket)
            return ObjectsPinned(count=engine.pin(request.bucket, request.keys, request.pinned))


def _check_not_hidden(bucket: str) -> None:
    """The buckets that the server keeps for itself are nobody's to operate."""
    if bucket.startswith("."):
        raise no_such_bucket(bucket)


def _check_policy(policy: BucketPolicy) -> None:
    quota_bytes, ttl_s = policy.quota_bytes, policy.ttl_s
    if quota_bytes is not None and quota_bytes < 1:
        raise InvalidRequest(f"quota_bytes must be at least 1, got {quota_bytes}; nil is no quota")
    if ttl_s is not None and not 0 < ttl_s < math.inf:
        raise InvalidRequest(f"ttl_s must be above 0, got {ttl_s:g}; nil keeps objects forever")


def _answer_multipart(service: Service, request: GatewayRequest) -> msgspec.Struct:
    engine = service.engine
    match request:
        case CreateUpload():
            info = multipart.create_upload(engine, request.bucket, request.key, request.attributes)
            return Upload(info=info)
        case CopyPart():
            return Stored(info=multipart.copy_part(engine, request))
        case CompleteUpload():
            bytes_max = service.limits.joined_object_bytes_max
            return Stored(info=multipart.complete_upload(engine, request, bytes_max))
        case AbortUpload():
            name = multipart.UploadName(request.bucket, request.key, request.upload_id)
            multipart.abort_upload(engine, name)
            return Done()
        case ListParts():
            return multipart.list_parts(engine, request)
        case ListUploads():
            return multipart.list_uploads(engine, request)
        case _:
            raise AssertionError(f"{type(request).__name__} has a handler of its own")


def _copy_object(service: Service, request: CopyObject) -> Stored:
    engine = service.engine
    layout = engine.bucket(request.bucket).layout
    block_bytes = (
        slice_block_bytes(layout.per_layer_chunk_bytes) if layout else CHECKSUM_BLOCK_BYTES
    )
    staged = engine.stage(request.bucket, request.key, block_bytes)
    try:
        engine.copy(
            request.source_bucket, request.source_key, staged, source_etag=request.source_etag
        )
        put = StagedPut(staged, request.etag, request.attributes)
        return Stored(info=engine.commit([put], request.condition)[0].info)
    finally:
        staged.discard()


def _create_session(service: Service, request: CreateSession) -> SessionTicket:
    return SessionTicket(
        ticket=service.tickets.issue(request.identity, time.monotonic()),
        socket_path=str(service.settings.target_socket),
        host_id=service.host_id,
        expires_s=TICKET_LIFE_S,
    )
