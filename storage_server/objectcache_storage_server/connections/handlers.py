"""The handler of each request: one row each, in the table `HANDLERS`, by the part of the service
that it is handed.

A handler has the conversation to itself, or returns the one reply that there is. What blocks on the
engine is called in a worker thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from objectcache_schemas.messages.buckets import (
    ConfigureBucket,
    CreateBucket,
    DeleteBucket,
    GetBucket,
    ListBuckets,
    SetLayout,
    SetPolicy,
)
from objectcache_schemas.messages.kv import KvGet, KvMatch, KvPut
from objectcache_schemas.messages.leases import LeaseTarget
from objectcache_schemas.messages.message import Message
from objectcache_schemas.messages.quotas import CheckPut, GetUsage, TakeRequests
from objectcache_schemas.messages.reads import ListObjects, OpenObject, StatObject
from objectcache_schemas.messages.sessions import CreateSession, JoinForClient, SessionTicket
from objectcache_schemas.messages.uploads import (
    AbortUpload,
    CompleteUpload,
    CreateUpload,
    ListParts,
    ListUploads,
)
from objectcache_schemas.messages.writes import (
    CopyObject,
    CopyPart,
    DeleteObjects,
    PinObjects,
    PutObject,
    PutPart,
    ReplaceAttributes,
)
from objectcache_schemas.operators.account_changes import (
    ChangeAccounts,
    ExportAccounts,
    ImportAccounts,
    WatchDirectory,
)
from objectcache_schemas.operators.engine_status import (
    CheckEngine,
    EngineState,
    GetEngineStatus,
    TakeCheckpoint,
)
from objectcache_schemas.operators.schedule import GetSchedule, SetSchedule
from objectcache_schemas.operators.server_list import GetServers
from objectcache_schemas.operators.server_state import (
    Drain,
    GetHealth,
    GetMetrics,
    Metrics,
    SetLogLevel,
)
from objectcache_schemas.operators.traces import GetTraces
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.conversations.tickets import TICKET_LIFE_S
from objectcache_storage_server.deliveries.open_prefix import match_prefix
from objectcache_storage_server.deliveries.prefix_gets import serve_kv_get
from objectcache_storage_server.deliveries.schedule import Schedule
from objectcache_storage_server.fleet.own_state import OwnState
from objectcache_storage_server.leases.lend_target import serve_lease
from objectcache_storage_server.operators import account_requests, process_requests
from objectcache_storage_server.operators.run_checks import Checks
from objectcache_storage_server.puts.prefix_puts import serve_kv_put
from objectcache_storage_server.quotas.take_requests import take_requests
from objectcache_storage_server.s3 import (
    bucket_requests,
    copy_requests,
    multipart,
    object_requests,
    upload_requests,
)
from objectcache_storage_server.s3.bucket_pages import bucket_page
from objectcache_storage_server.s3.bucket_requests import BucketMeans
from objectcache_storage_server.s3.object_gets import serve_object
from objectcache_storage_server.s3.object_puts import check_put, serve_put_object, serve_put_part
from objectcache_storage_server.service import Service

PartT = TypeVar("PartT")
M = TypeVar("M", bound=Message)
Handler = Callable[[Service, Conversation, Any], Awaitable[None]]
Serve = Callable[[Service, PartT, Conversation, Any], Awaitable[None]]  # handed a part of it, too
Row = tuple[type[Message], Serve[PartT]]


def _talking(
    kind: type[M], serve: Callable[[PartT, Conversation, M], Awaitable[None]]
) -> Row[PartT]:
    """A request with a conversation of its own."""
    return kind, lambda service, part, talk, request: serve(part, talk, request)


def _answered(kind: type[M], answer: Callable[[PartT, M], Awaitable[msgspec.Struct]]) -> Row[PartT]:
    """A request with one reply."""

    async def serve(service: Service, part: PartT, talk: Conversation, request: M) -> None:
        await talk.send(await answer(part, request))

    return kind, serve


def _at_once(kind: type[M], answer: Callable[[PartT, M], msgspec.Struct]) -> Row[PartT]:
    """A request with one reply, from a function that blocks."""

    async def serve(service: Service, part: PartT, talk: Conversation, request: M) -> None:
        await talk.send(await service.calls.call(answer, part, request))

    return kind, serve


def _changing(kind: type[M], change: Callable[[BucketMeans, M], None]) -> Row[BucketMeans]:
    """A change of a bucket, which blocks; answered when the gateways have heard of it."""
    return _answered(
        kind,
        lambda means, request: bucket_requests.change_bucket(means, lambda: change(means, request)),
    )


def _of(part: Callable[[Service], PartT], *rows: Row[PartT]) -> dict[type[Message], Handler]:
    """The rows of one part of the service, which their handlers are handed."""

    def handler(serve: Serve[PartT]) -> Handler:
        return lambda service, talk, request: serve(service, part(service), talk, request)

    return {kind: handler(serve) for kind, serve in rows}


async def _join_for_client(service: Service, talk: Conversation, request: JoinForClient) -> None:
    talk.give_up()  # the connection is the session's from here on
    await service.sessions.serve_client_of_gateway(
        request.identity, talk.stream, request.access_key
    )


def _create_session(service: Service, request: CreateSession) -> SessionTicket:
    return SessionTicket(
        ticket=service.tickets.issue(request.identity, time.monotonic(), request.access_key),
        socket_path=str(service.settings.target_socket),
        host_id=service.own.host_id,
        expires_s=TICKET_LIFE_S,
    )


HANDLERS: dict[type[Message], Handler] = {
    **_of(
        lambda service: service.gets,
        _talking(KvGet, serve_kv_get),
        _talking(OpenObject, serve_object),
        _talking(LeaseTarget, serve_lease),
    ),
    **_of(
        lambda service: service.puts,
        _talking(KvPut, serve_kv_put),
        _talking(PutObject, serve_put_object),
        _answered(CheckPut, check_put),
        _answered(CopyObject, copy_requests.copy_object),
    ),
    **_of(
        lambda service: service.uploads,
        _at_once(CreateUpload, upload_requests.create_upload),
        _talking(PutPart, serve_put_part),
        _answered(CopyPart, copy_requests.copy_part),
        _answered(CompleteUpload, copy_requests.complete),
        _at_once(AbortUpload, upload_requests.abort_upload),
    ),
    **_of(
        lambda service: service.buckets,
        _changing(CreateBucket, bucket_requests.create_bucket),
        _changing(DeleteBucket, bucket_requests.delete_bucket),
        _changing(SetLayout, bucket_requests.set_layout),
        _changing(SetPolicy, bucket_requests.set_policy),
        _changing(ConfigureBucket, bucket_requests.configure_bucket),
        _at_once(GetBucket, bucket_requests.get_bucket),
        _at_once(DeleteObjects, bucket_requests.delete_objects),
        _at_once(GetUsage, bucket_requests.get_usage),
    ),
    **_of(
        lambda service: service.engine,
        _at_once(KvMatch, match_prefix),
        _at_once(StatObject, object_requests.stat_object),
        _at_once(ListObjects, object_requests.list_stored),
        _at_once(ReplaceAttributes, object_requests.replace_attributes),
        _at_once(PinObjects, object_requests.pin_objects),
        _at_once(ListParts, multipart.list_parts),
        _at_once(ListUploads, multipart.list_uploads),
        _at_once(ListBuckets, bucket_page),
        _at_once(GetEngineStatus, lambda engine, _: EngineState(status=engine.status())),
        _at_once(TakeCheckpoint, lambda engine, _: engine.take_checkpoint()),
    ),
    **_of(
        lambda service: service.accounts,
        _talking(WatchDirectory, account_requests.serve_watch),
        _answered(ChangeAccounts, account_requests.change_accounts),
        _answered(ImportAccounts, account_requests.import_accounts),
        _at_once(ExportAccounts, account_requests.export_accounts),
        _answered(
            TakeRequests,
            lambda means, asked: take_requests(means.books, means.calls, asked),
        ),
    ),
    **_of(
        lambda service: service.schedule,
        _at_once(GetSchedule, lambda schedule, _: schedule.state()),
        _at_once(SetSchedule, Schedule.change),
    ),
    **_of(lambda service: service.checks, _talking(CheckEngine, Checks.serve)),
    **_of(lambda service: service.own, _answered(GetServers, OwnState.answer)),
    **_of(
        lambda service: service,
        _at_once(CreateSession, _create_session),
        _talking(JoinForClient, _join_for_client),
        _at_once(GetHealth, lambda service, _: service.health()),
        _at_once(GetMetrics, lambda service, _: Metrics(text=service.metrics_text())),
        _at_once(GetTraces, lambda service, asked: service.traces.answer(asked, time.monotonic())),
        _at_once(Drain, lambda service, asked: process_requests.drain(service.gates, asked)),
        _at_once(SetLogLevel, lambda _, asked: process_requests.change_log_level(asked)),
    ),
}
