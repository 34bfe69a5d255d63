"""One gateway connection: requests one after the other, each to its handler."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from objectcache_schemas.conversations import GatewayRequest
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.messages.buckets import (
    ConfigureBucket,
    CreateBucket,
    DeleteBucket,
    SetLayout,
    SetPolicy,
)
from objectcache_schemas.messages.frames import FrameError
from objectcache_schemas.messages.handshake import Hello, Welcome
from objectcache_schemas.messages.kv import KvGet, KvPut
from objectcache_schemas.messages.leases import LeaseTarget
from objectcache_schemas.messages.message import PROTOCOL_VERSION
from objectcache_schemas.messages.quotas import CheckPut, TakeRequests
from objectcache_schemas.messages.reads import OpenObject
from objectcache_schemas.messages.sessions import JoinForClient
from objectcache_schemas.messages.uploads import CompleteUpload
from objectcache_schemas.messages.writes import CopyObject, CopyPart, PutObject, PutPart
from objectcache_schemas.operators.account_changes import (
    ChangeAccounts,
    ImportAccounts,
    WatchDirectory,
)
from objectcache_schemas.operators.engine_status import CheckEngine
from objectcache_storage_server.connections.answer_at_once import answer
from objectcache_storage_server.connections.refuse_drained import check_not_drained
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.conversations.sockets import ConnectionEnded, StreamSocket
from objectcache_storage_server.deliveries.lend_target import serve_lease
from objectcache_storage_server.deliveries.prefix_gets import serve_kv_get, serve_object
from objectcache_storage_server.operators.account_requests import serve_change, serve_watch
from objectcache_storage_server.operators.run_checks import serve_check
from objectcache_storage_server.puts.counted_puts import check_put, take_requests
from objectcache_storage_server.puts.receive_puts import (
    serve_kv_put,
    serve_put_object,
    serve_put_part,
)
from objectcache_storage_server.s3.bucket_requests import serve_bucket_change
from objectcache_storage_server.s3.copy_requests import complete, copy_object, copy_part
from objectcache_storage_server.service import Service

HELLO_TIMEOUT_S = 10.0

logger = logging.getLogger("objectcache.storage_server.connection")
_HELLO = msgspec.msgpack.Decoder(Hello)
_REQUEST = msgspec.msgpack.Decoder(GatewayRequest)


class GatewayConnection:
    """Serves one gateway connection. `idle` is true between requests."""

    def __init__(self, service: Service, stream: StreamSocket) -> None:
        self._service = service
        self._stream = stream
        stream.reads_ahead = True  # one request at a time
        self.idle = True

    async def serve(self) -> None:
        """Serve until the gateway closes, or a body had to be cut."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                if not await self._welcome():
                    return
            while not self._service.draining:
                self.idle = True
                request = await self._stream.receive_frame(_REQUEST)
                self.idle = False
                if not await self._serve_request(request):
                    return
        except (ConnectionEnded, FrameError, TimeoutError) as error:
            logger.debug("connection ended: %r", error)
        except OSError as error:
            logger.debug("connection lost: %s", error)

    async def _welcome(self) -> bool:
        hello = await self._stream.receive_frame(_HELLO)
        limits = self._service.limits.fingerprint()
        if hello.v != PROTOCOL_VERSION or hello.limits_fingerprint != limits:
            error = InvalidRequest(
                "gateway and storage server disagree on the protocol's version or on [limits]; "
                "give both the same settings"
            )
            await self._stream.send_frame(error.to_wire())
            return False
        engine = self._service.engine.capabilities.name
        await self._stream.send_frame(Welcome(v=PROTOCOL_VERSION, engine=engine))
        return True

    async def _serve_request(self, request: GatewayRequest) -> bool:
        """Carry out one request; false when the connection cannot go on."""
        talk = Conversation(self._stream)
        try:
            await self._dispatch(talk, request)
        except ObjectCacheError as error:
            self._service.counts.errors.add(error.code)
            await talk.send(error.to_wire())
        except (ConnectionEnded, FrameError, OSError):
            raise
        except Exception:
            logger.exception("%s failed", type(request).__name__)
            self._service.counts.errors.add(ObjectCacheError.default_code)
            await talk.send(ObjectCacheError("the storage server failed; see its log").to_wire())
            return False
        return not talk.given_up

    async def _dispatch(self, talk: Conversation, request: GatewayRequest) -> None:
        service = self._service
        check_not_drained(service, request)
        match request:
            case OpenObject():
                await serve_object(service, talk, request)
            case KvGet():
                await serve_kv_get(service, talk, request)
            case PutObject():
                await serve_put_object(service, talk, request)
            case PutPart():
                await serve_put_part(service, talk, request)
            case KvPut():
                await serve_kv_put(service, talk, request)
            case LeaseTarget():
                await serve_lease(service, talk, request)
            case JoinForClient():
                talk.give_up()  # the connection is the session's from here on
                await service.sessions.serve_client_of_gateway(
                    request.identity, self._stream, request.access_key
                )
            case CopyObject():
                await talk.send(await copy_object(service, request))
            case CopyPart():
                await talk.send(await copy_part(service, request))
            case CompleteUpload():
                await talk.send(await complete(service, request))
            case CheckEngine():
                await serve_check(service, talk, request)
            case ChangeAccounts() | ImportAccounts():
                await serve_change(service, talk, request)
            case CreateBucket() | DeleteBucket() | SetLayout() | SetPolicy() | ConfigureBucket():
                await serve_bucket_change(service, talk, request)
            case CheckPut():
                await talk.send(await check_put(service, request))
            case TakeRequests():
                await talk.send(await take_requests(service, request))
            case WatchDirectory():
                await serve_watch(service, talk, request)
            case _:
                await talk.send(await service.call(answer, service, request))
