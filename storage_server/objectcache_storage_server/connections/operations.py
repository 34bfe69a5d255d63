"""Requests that take one answer: blocking functions over the engine."""

from __future__ import annotations

import time

import msgspec

from objectcache_schemas.accounts import ExportAccounts
from objectcache_schemas.engine_status import EngineState, GetEngineStatus
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.logs import set_log_level
from objectcache_schemas.messages import (
    AbortUpload,
    CompleteUpload,
    ConfigureBucket,
    CopyObject,
    CopyPart,
    CreateBucket,
    CreateSession,
    CreateUpload,
    DeleteBucket,
    DeleteObjects,
    Done,
    Drain,
    GatewayRequest,
    GetBucket,
    GetHealth,
    GetMetrics,
    GetUsage,
    KvMatch,
    ListBuckets,
    ListObjects,
    ListParts,
    ListUploads,
    Matched,
    Metrics,
    Object,
    ObjectsPinned,
    PinObjects,
    ReplaceAttributes,
    SessionTicket,
    SetLayout,
    SetLogLevel,
    SetPolicy,
    StatObject,
    Stored,
)
from objectcache_schemas.schedule import GetSchedule, SetSchedule
from objectcache_schemas.traces import GetTraces
from objectcache_storage_server.connections.account_requests import answer_accounts
from objectcache_storage_server.connections.buckets import (
    answer_change,
    answer_lookup,
    check_not_hidden,
)
from objectcache_storage_server.connections.uploads import answer_upload
from objectcache_storage_server.engines.base import CHECKSUM_BLOCK_BYTES, StagedPut
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.listing import list_objects
from objectcache_storage_server.service import Service
from objectcache_storage_server.tickets import TICKET_LIFE_S


def answer(service: Service, request: GatewayRequest) -> msgspec.Struct:
    """The reply to a simple request. Raises what the engine raises."""
    engine = service.engine
    match request:
        case GetHealth():
            return service.health()
        case GetBucket() | ListBuckets() | GetUsage():
            return answer_lookup(service, request)
        case CreateBucket() | DeleteBucket() | SetLayout() | SetPolicy() | ConfigureBucket():
            return answer_change(service, request)
        case StatObject():
            return Object(info=engine.stat(request.bucket, request.key))
        case ListObjects():
            with engine.scanning(request.bucket) as scan:
                return list_objects(request, scan)
        case CopyObject():
            return _copy_object(service, request)
        case ReplaceAttributes():
            return _replace_attributes(service, request)
        case DeleteObjects():
            engine.delete(request.bucket, request.keys)
            return Done()
        case KvMatch():
            matched = engine.match(request.bucket, request.chunk_keys)
            layout = engine.bucket(request.bucket).layout
            return Matched(matched=matched, chunk_tokens=layout.chunk_tokens if layout else 0)
        case CreateSession():
            return _create_session(service, request)
        case GetEngineStatus():
            return EngineState(status=engine.status())
        case PinObjects():
            check_not_hidden(request.bucket)
            return ObjectsPinned(count=engine.pin(request.bucket, request.keys, request.pinned))
        case GetSchedule():
            return service.schedule_state()
        case SetSchedule():
            return service.change_schedule(request)
        case GetMetrics():
            return Metrics(text=service.metrics_page.text())
        case SetLogLevel():
            set_log_level(request.level)
            return Done()
        case Drain():
            service.entrance.drained = request.draining
            return Done()
        case GetTraces():
            return service.traces.answer(request, time.monotonic())
        case (
            CreateUpload()
            | CopyPart()
            | CompleteUpload()
            | AbortUpload()
            | ListParts()
            | ListUploads()
        ):
            return answer_upload(service, request)
        case ExportAccounts():
            return answer_accounts(service, request)
        case _:
            raise AssertionError(f"{type(request).__name__} has a handler of its own")


def _copy_object(service: Service, request: CopyObject) -> Stored:
    bucket = service.engine.bucket(request.bucket)
    size_bytes = service.engine.stat(request.source_bucket, request.source_key).size_bytes
    # Where the source changes in between, its ETag does, and nothing is copied.
    with service.stored.reserving(bucket, 1, size_bytes):
        return _copy_within(service, request, bucket.layout)


def _copy_within(service: Service, request: CopyObject, layout: KvLayout | None) -> Stored:
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
        return Stored(info=engine.commit([put], request.condition)[0].info)
    finally:
        staged.discard()


def _replace_attributes(service: Service, request: ReplaceAttributes) -> Object:
    check_not_hidden(request.bucket)
    info = service.engine.replace_attributes(
        request.bucket, request.key, request.etag, request.attributes
    )
    return Object(info=info)


def _create_session(service: Service, request: CreateSession) -> SessionTicket:
    return SessionTicket(
        ticket=service.tickets.issue(request.identity, time.monotonic()),
        socket_path=str(service.settings.target_socket),
        host_id=service.host_id,
        expires_s=TICKET_LIFE_S,
    )
