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
    Bucket,
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
from objectcache_schemas.messages.reads import ListObjects, Object, OpenObject, StatObject
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
    AccountsExported,
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
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.conversations.tickets import TICKET_LIFE_S
from objectcache_storage_server.deliveries.lend_target import serve_lease
from objectcache_storage_server.deliveries.prefix_gets import serve_kv_get, serve_object
from objectcache_storage_server.operators import account_requests, process_requests
from objectcache_storage_server.operators.run_checks import serve_check
from objectcache_storage_server.puts.counted_puts import check_put, take_requests
from objectcache_storage_server.puts.receive_puts import (
    serve_kv_put,
    serve_put_object,
    serve_put_part,
)
from objectcache_storage_server.s3 import (
    bucket_requests,
    copy_requests,
    multipart,
    object_requests,
    upload_requests,
)
from objectcache_storage_server.s3.bucket_pages import bucket_page
from objectcache_storage_server.service import Service

M = TypeVar("M", bound=Message)
Handler = Callable[[Service, Conversation, Any], Awaitable[None]]
Row = tuple[type[Message], Handler]


def _talking(kind: type[M], serve: Callable[[Service, Conversation, M], Awaitable[None]]) -> Row:
    """A request with a conversation of its own."""
    return kind, serve


def _answered(kind: type[M], answer: Callable[[Service, M], Awaitable[msgspec.Struct]]) -> Row:
    """A request with one reply."""

    async def serve(service: Service, talk: Conversation, request: M) -> None:
        await talk.send(await answer(service, request))

    return kind, serve


def _at_once(kind: type[M], answer: Callable[[Service, M], msgspec.Struct]) -> Row:
    """A request with one reply, from a function that blocks."""
    return _answered(kind, lambda service, request: service.call(answer, service, request))


def _changing_a_bucket(kind: type[M], change: Callable[[Service, M], None]) -> Row:
    """A change of a bucket, which blocks; answered when the gateways have heard of it."""
    return _answered(
        kind,
        lambda service, request: bucket_requests.change_bucket(
            service, lambda: change(service, request)
        ),
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
        _talking(KvGet, serve_kv_get),
        _talking(OpenObject, serve_object),
        _talking(LeaseTarget, serve_lease),
        _talking(KvPut, serve_kv_put),
        _talking(PutObject, serve_put_object),
        _talking(PutPart, serve_put_part),
        _at_once(KvMatch, object_requests.match_prefix),
        _at_once(
            StatObject,
            lambda service, asked: Object(info=service.engine.stat(asked.bucket, asked.key)),
        ),
        _at_once(ListObjects, object_requests.list_stored),
        _at_once(ReplaceAttributes, object_requests.replace_attributes),
        _at_once(DeleteObjects, object_requests.delete_objects),
        _at_once(PinObjects, object_requests.pin_objects),
        _answered(CopyObject, copy_requests.copy_object),
        # sessions
        _at_once(CreateSession, _create_session),
        _talking(JoinForClient, _join_for_client),
        # multipart uploads
        _at_once(CreateUpload, upload_requests.create_upload),
        _answered(CopyPart, copy_requests.copy_part),
        _answered(CompleteUpload, copy_requests.complete),
        _at_once(AbortUpload, upload_requests.abort_upload),
        _at_once(ListParts, lambda service, asked: multipart.list_parts(service.engine, asked)),
        _at_once(ListUploads, lambda service, asked: multipart.list_uploads(service.engine, asked)),
        # buckets
        _at_once(GetBucket, lambda service, asked: Bucket(info=service.engine.bucket(asked.name))),
        _at_once(ListBuckets, lambda service, asked: bucket_page(service.engine, asked)),
        _changing_a_bucket(CreateBucket, bucket_requests.create_bucket),
        _changing_a_bucket(DeleteBucket, bucket_requests.delete_bucket),
        _changing_a_bucket(SetLayout, bucket_requests.set_layout),
        _changing_a_bucket(SetPolicy, bucket_requests.set_policy),
        _changing_a_bucket(ConfigureBucket, bucket_requests.configure_bucket),
        # quotas
        _at_once(GetUsage, bucket_requests.get_usage),
        _answered(CheckPut, check_put),
        _answered(TakeRequests, take_requests),
        # accounts
        _talking(WatchDirectory, account_requests.serve_watch),
        _answered(ChangeAccounts, account_requests.change_accounts),
        _answered(ImportAccounts, account_requests.import_accounts),
        _at_once(
            ExportAccounts,
            lambda service, asked: AccountsExported(data=service.accounts.export(asked.passphrase)),
        ),
        # the server
        _at_once(GetHealth, lambda service, _: service.health()),
        _at_once(GetMetrics, lambda service, _: Metrics(text=service.metrics_text())),
        _at_once(GetEngineStatus, lambda service, _: EngineState(status=service.engine.status())),
        _at_once(GetSchedule, lambda service, _: service.schedule_state()),
        _at_once(SetSchedule, lambda service, asked: service.change_schedule(asked)),
        _at_once(GetTraces, lambda service, asked: service.traces.answer(asked, time.monotonic())),
        _at_once(SetLogLevel, process_requests.change_log_level),
        _at_once(Drain, process_requests.drain),
        _talking(CheckEngine, serve_check),
    )
)
