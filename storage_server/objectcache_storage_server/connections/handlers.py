"""The handler of each request: one row each, in the table `HANDLERS`.

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
from objectcache_schemas.operators.engine_status import CheckEngine, EngineState, GetEngineStatus
from objectcache_schemas.operators.schedule import GetSchedule, SetSchedule
from objectcache_schemas.operators.server_state import (
    Drain,
    GetHealth,
    GetMetrics,
    Metrics,
    SetLogLevel,
)
from objectcache_schemas.operators.traces import GetTraces
from objectcache_storage_server.admission.gates import Gates
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.conversations.tickets import TICKET_LIFE_S
from objectcache_storage_server.deliveries.get_means import GetMeans
from objectcache_storage_server.deliveries.open_prefix import match_prefix
from objectcache_storage_server.deliveries.prefix_gets import serve_kv_get
from objectcache_storage_server.deliveries.schedule import Schedule
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.leases.lend_target import serve_lease
from objectcache_storage_server.operators import account_requests, process_requests
from objectcache_storage_server.operators.run_checks import Checks
from objectcache_storage_server.puts.prefix_puts import serve_kv_put
from objectcache_storage_server.puts.store_means import StoreMeans
from objectcache_storage_server.quotas.books import Books
from objectcache_storage_server.quotas.take_requests import take_requests
from objectcache_storage_server.s3 import (
    bucket_requests,
    copy_requests,
    multipart,
    object_requests,
    upload_requests,
)
from objectcache_storage_server.s3.bucket_pages import bucket_page
from objectcache_storage_server.s3.object_gets import serve_object
from objectcache_storage_server.s3.object_puts import check_put, serve_put_object, serve_put_part
from objectcache_storage_server.service import Service
from objectcache_storage_server.tracing.trace_book import TraceBook

M = TypeVar("M", bound=Message)
PartT = TypeVar("PartT")
Handler = Callable[[Service, Conversation, Any], Awaitable[None]]
Row = tuple[type[Message], Handler]


def _gets(service: Service) -> GetMeans:
    return service.gets


def _store(service: Service) -> StoreMeans:
    return service.store


def _books(service: Service) -> Books:
    return service.books


def _checks(service: Service) -> Checks:
    return service.checks


def _engine(service: Service) -> Engine:
    return service.engine


def _gates(service: Service) -> Gates:
    return service.gates


def _schedule(service: Service) -> Schedule:
    return service.schedule


def _traces(service: Service) -> TraceBook:
    return service.traces


def _all(service: Service) -> Service:
    return service


def _talking(
    kind: type[M],
    part: Callable[[Service], PartT],
    serve: Callable[[PartT, Conversation, M], Awaitable[None]],
) -> Row:
    """A request with a conversation of its own. `part` says what its handler is handed."""
    return kind, lambda service, talk, request: serve(part(service), talk, request)


def _answered(
    kind: type[M],
    part: Callable[[Service], PartT],
    answer: Callable[[PartT, M], Awaitable[msgspec.Struct]],
) -> Row:
    """A request with one reply."""

    async def serve(service: Service, talk: Conversation, request: M) -> None:
        await talk.send(await answer(part(service), request))

    return kind, serve


def _at_once(
    kind: type[M],
    part: Callable[[Service], PartT],
    answer: Callable[[PartT, M], msgspec.Struct],
) -> Row:
    """A request with one reply, from a function that blocks."""
    return _answered(
        kind,
        _all,
        lambda service, request: service.calls.call(answer, part(service), request),
    )


def _changing_a_bucket(kind: type[M], change: Callable[[StoreMeans, M], None]) -> Row:
    """A change of a bucket, which blocks; answered when the gateways have heard of it."""
    return _answered(
        kind,
        _store,
        lambda means, request: bucket_requests.change_bucket(means, lambda: change(means, request)),
    )


async def _join_for_client(service: Service, talk: Conversation, request: JoinForClient) -> None:
    talk.give_up()  # the connection is the session's from here on
    await service.sessions.serve_client_of_gateway(
        request.identity, talk.stream, request.access_key
    )


def _create_session(service: Service, request: CreateSession) -> SessionTicket:
    return SessionTicket(
        ticket=service.tickets.issue(request.identity, time.monotonic(), request.access_key),
        socket_path=str(service.settings.target_socket),
        host_id=service.host_id,
        expires_s=TICKET_LIFE_S,
    )


HANDLERS: dict[type[Message], Handler] = dict(
    (
        # prefixes, objects, and the memory they go to
        _talking(KvGet, _gets, serve_kv_get),
        _talking(OpenObject, _gets, serve_object),
        _talking(LeaseTarget, _gets, serve_lease),
        _talking(KvPut, _store, serve_kv_put),
        _talking(PutObject, _store, serve_put_object),
        _talking(PutPart, _store, serve_put_part),
        _at_once(KvMatch, _engine, match_prefix),
        _at_once(StatObject, _engine, object_requests.stat_object),
        _at_once(ListObjects, _engine, object_requests.list_stored),
        _at_once(ReplaceAttributes, _engine, object_requests.replace_attributes),
        _at_once(DeleteObjects, _store, object_requests.delete_objects),
        _at_once(PinObjects, _engine, object_requests.pin_objects),
        _answered(CopyObject, _store, copy_requests.copy_object),
        # sessions
        _at_once(CreateSession, _all, _create_session),
        _talking(JoinForClient, _all, _join_for_client),
        # multipart uploads
        _at_once(CreateUpload, _store, upload_requests.create_upload),
        _answered(CopyPart, _store, copy_requests.copy_part),
        _answered(CompleteUpload, _store, copy_requests.complete),
        _at_once(AbortUpload, _store, upload_requests.abort_upload),
        _at_once(ListParts, _engine, multipart.list_parts),
        _at_once(ListUploads, _engine, multipart.list_uploads),
        # buckets
        _at_once(GetBucket, _engine, bucket_requests.get_bucket),
        _at_once(ListBuckets, _engine, bucket_page),
        _changing_a_bucket(CreateBucket, bucket_requests.create_bucket),
        _changing_a_bucket(DeleteBucket, bucket_requests.delete_bucket),
        _changing_a_bucket(SetLayout, bucket_requests.set_layout),
        _changing_a_bucket(SetPolicy, bucket_requests.set_policy),
        _changing_a_bucket(ConfigureBucket, bucket_requests.configure_bucket),
        # quotas
        _at_once(GetUsage, _store, bucket_requests.get_usage),
        _answered(CheckPut, _store, check_put),
        _answered(
            TakeRequests,
            _store,
            lambda means, asked: take_requests(means.books, means.calls, asked),
        ),
        # accounts
        _talking(WatchDirectory, _store, account_requests.serve_watch),
        _answered(ChangeAccounts, _store, account_requests.change_accounts),
        _answered(ImportAccounts, _store, account_requests.import_accounts),
        _at_once(ExportAccounts, _books, account_requests.export_accounts),
        # the server
        _at_once(GetHealth, _all, lambda service, _: service.health()),
        _at_once(GetMetrics, _all, lambda service, _: Metrics(text=service.metrics_text())),
        _at_once(GetEngineStatus, _engine, lambda engine, _: EngineState(status=engine.status())),
        _at_once(GetSchedule, _schedule, lambda schedule, _: schedule.state()),
        _at_once(SetSchedule, _schedule, Schedule.change),
        _at_once(GetTraces, _traces, lambda traces, asked: traces.answer(asked, time.monotonic())),
        _at_once(SetLogLevel, _all, lambda _, asked: process_requests.change_log_level(asked)),
        _at_once(Drain, _gates, process_requests.drain),
        _talking(CheckEngine, _checks, Checks.serve),
    )
)
