"""A client's connection to the gateway, and what makes and counts them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import web

from objectcache_gateway.answering.http_exchange import SERVER_NAME, error_response
from objectcache_gateway.connections.end_connections import BoundConnection, ConnectionBound
from objectcache_gateway.metrics.request_counts import RequestCounts
from objectcache_runtime.settings import Settings
from objectcache_schemas import headers
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.messages.request_labels import new_request_id

# A key of 1,024 bytes triples when it is encoded, and a presigned query comes on top.
LINE_BYTES_MAX = 32 << 10
HEADER_NAME_BYTES = 1 << 10  # beside a descriptor of the largest size, so that its own limit speaks
OTHER_HEADERS_BYTES = 32 << 10  # beside the request line and a descriptor; S3 takes 8 KiB
READ_BUFFER_BYTES = 256 << 10

logger = logging.getLogger("objectcache.gateway.connections")


class ClientConnection(BoundConnection):
    """aiohttp's side of one client connection."""

    def __init__(self, server: HttpServer, settings: Settings, give_up: Callable[[], None]) -> None:
        field_bytes_max = max(
            LINE_BYTES_MAX, settings.limits.descriptor_header_bytes_max + HEADER_NAME_BYTES
        )
        super().__init__(
            server,
            server.bound,
            give_up,
            logger=logger,
            keepalive_timeout_s=settings.gateway.keepalive_timeout_s,
            line_bytes_max=LINE_BYTES_MAX,
            field_bytes_max=field_bytes_max,
            head_bytes_max=LINE_BYTES_MAX + field_bytes_max + OTHER_HEADERS_BYTES,
            read_buffer_bytes=READ_BUFFER_BYTES,
            lingering_s=0.0,  # the gateway drains by bytes as well as by time
        )
        self._counts = server.counts
        self._counts.accepted_connections += 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Have bodies leave the transport before more is written."""
        tcp = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        # With no high-water mark a drained transport is an empty one: its buffers may be reused,
        # and its socket may be handed over. TLS pauses at the mark, not above it, so that a mark of
        # 0 would pause an empty transport for good.
        high_bytes = 0 if tcp.get_extra_info("sslcontext") is None else 1
        tcp.set_write_buffer_limits(high=high_bytes, low=0)
        super().connection_made(transport)

    def unreadable(self, what: str) -> None:
        """Count and log it."""
        super().unreadable(what)
        self._counts.unreadable += 1

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what aiohttp could not parse, without a byte of it."""
        self.unreadable(type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        error = InvalidRequest(
            "the request is not HTTP/1.1, or its head is over a limit", code="InvalidRequest"
        )
        request_id = new_request_id()
        named = {
            "Server": SERVER_NAME,
            "x-amz-request-id": request_id,
            headers.REQUEST_ID: request_id,
        }
        response = error_response(error, "GET", "", named)
        response.force_close()
        return response


class HttpServer(web.Server):
    """Makes `ClientConnection`s, at most `connections_max` at a time."""

    def __init__(
        self,
        handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        settings: Settings,
        counts: RequestCounts,
        connections_max: int,
    ) -> None:
        super().__init__(handle, handler_cancellation=True)
        self.bound = ConnectionBound(connections_max, logger)
        self.counts = counts
        self._settings = settings

    def connection(self, give_up: Callable[[], None]) -> ClientConnection:
        """The protocol of what was just accepted; `give_up` ends it before it is a connection."""
        return ClientConnection(self, self._settings, give_up)
