"""One gateway connection: requests one after the other, each to its handler."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from objectcache_runtime.networking.stream_socket import ConnectionEnded, StreamSocket
from objectcache_schemas.conversations import GatewayRequest
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.messages.frames import FrameError
from objectcache_schemas.messages.handshake import Hello, Welcome
from objectcache_schemas.messages.message import PROTOCOL_VERSION, REQUESTS, Changes
from objectcache_storage_server.admission.entrance import drained
from objectcache_storage_server.connections.handlers import HANDLERS
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.service import Service

HELLO_TIMEOUT_S = 10.0
# Beside deliveries and puts, which are refused where they are admitted. Accounts, pins and the
# schedule are an operator's, and may change.
REFUSED_WHEN_DRAINED = (Changes.OBJECTS, Changes.UPLOADS, Changes.BUCKETS)

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
            while not self._service.gates.draining:
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
        limits = self._service.settings.limits.fingerprint()
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
            changes = REQUESTS[type(request)].changes
            if self._service.gates.entrance.drained and changes in REFUSED_WHEN_DRAINED:
                raise drained()
            await HANDLERS[type(request)](self._service, talk, request)
        except ObjectCacheError as error:
            self._service.counts.request_refused(error.code, time.monotonic())
            await talk.send(error.to_wire())
        except (ConnectionEnded, FrameError, OSError):
            raise
        except Exception:
            logger.exception("%s failed", type(request).__name__)
            self._service.counts.errors.add(ObjectCacheError.default_code)
            await talk.send(ObjectCacheError("the storage server failed; see its log").to_wire())
            return False
        return not talk.given_up
