"""Requests that take one answer: blocking functions over the engine."""

from __future__ import annotations

import time

import msgspec

from objectcache_runtime.logs import set_log_level
from objectcache_schemas.conversations import GatewayRequest
from objectcache_schemas.messages.buckets import GetBucket, ListBuckets
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import KvMatch, Matched
from objectcache_schemas.messages.quotas import GetUsage
from objectcache_schemas.messages.reads import ListObjects, Object, StatObject
from objectcache_schemas.messages.sessions import CreateSession, SessionTicket
from objectcache_schemas.messages.uploads import AbortUpload, CreateUpload, ListParts, ListUploads
from objectcache_schemas.messages.writes import (
    DeleteObjects,
    ObjectsPinned,
    PinObjects,
    ReplaceAttributes,
)
from objectcache_schemas.operators.account_changes import ExportAccounts
from objectcache_schemas.operators.engine_status import EngineState, GetEngineStatus
from objectcache_schemas.operators.schedule import GetSchedule, SetSchedule
from objectcache_schemas.operators.server_state import (
    Drain,
    GetHealth,
    GetMetrics,
    Metrics,
    SetLogLevel,
)
from objectcache_schemas.operators.traces import GetTraces
from objectcache_storage_server.conversations.tickets import TICKET_LIFE_S
from objectcache_storage_server.operators.account_requests import answer_accounts
from objectcache_storage_server.s3.bucket_requests import answer_lookup, check_not_hidden
from objectcache_storage_server.s3.list_objects import list_objects
from objectcache_storage_server.s3.upload_requests import answer_upload
from objectcache_storage_server.service import Service


def answer(service: Service, request: GatewayRequest) -> msgspec.Struct:
    """The reply to a simple request. Raises what the engine raises."""
    engine = service.engine
    match request:
        case GetHealth():
            return service.health()
        case GetBucket() | ListBuckets() | GetUsage():
            return answer_lookup(service, request)
        case StatObject():
            return Object(info=engine.stat(request.bucket, request.key))
        case ListObjects():
            with engine.scanning(request.bucket) as scan:
                return list_objects(request, scan)
        case ReplaceAttributes():
            return _replace_attributes(service, request)
        case DeleteObjects():
            engine.delete(request.bucket, request.keys)
            service.stored.shrunk(request.bucket)
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
            return Metrics(text=service.metrics_text())
        case SetLogLevel():
            set_log_level(request.level)
            return Done()
        case Drain():
            service.entrance.drained = request.draining
            return Done()
        case GetTraces():
            return service.traces.answer(request, time.monotonic())
        case CreateUpload() | AbortUpload() | ListParts() | ListUploads():
            return answer_upload(service, request)
        case ExportAccounts():
            return answer_accounts(service, request)
        case _:
            raise AssertionError(f"{type(request).__name__} has a handler of its own")


def _replace_attributes(service: Service, request: ReplaceAttributes) -> Object:
    check_not_hidden(request.bucket)
    info = service.engine.replace_attributes(request.bucket, request.seen, request.attributes)
    return Object(info=info)


def _create_session(service: Service, request: CreateSession) -> SessionTicket:
    return SessionTicket(
        ticket=service.tickets.issue(request.identity, time.monotonic(), request.access_key),
        socket_path=str(service.settings.target_socket),
        host_id=service.host_id,
        expires_s=TICKET_LIFE_S,
    )
