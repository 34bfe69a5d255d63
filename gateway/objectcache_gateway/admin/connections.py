"""The admin API's connections: how many there may be, and how long one may say nothing."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from objectcache_gateway.admin.problems import name_the_server, problem_response
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

CONNECTIONS_MAX = 256
FIRST_REQUEST_TIMEOUT_S = 15.0
KEEPALIVE_TIMEOUT_S = 75.0
LINE_BYTES_MAX = 16 << 10
UNREADABLE = (
    f"the request is not HTTP/1.1, or a line of its head is over {LINE_BYTES_MAX} bytes; "
    "is it TLS on a port without?"
)

logger = logging.getLogger("objectcache.gateway.admin")


class ConnectionBound:
    """Makes the protocols of connections, and refuses those that are too many."""

    def __init__(
        self,
        server: web.Server,
        connections_max: int = CONNECTIONS_MAX,
        first_request_timeout_s: float = FIRST_REQUEST_TIMEOUT_S,
    ) -> None:
        self._server = server
        self._connections_max = connections_max
        self._timeout_s = first_request_timeout_s
        self._silent: set[RequestHandler] = set()  # for the timeout at most

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a connection that was just accepted."""
        if len(self._server.connections) >= self._connections_max:
            return _Refusal()
        protocol = AdminConnection(self._server)
        self._silent.add(protocol)
        asyncio.get_running_loop().call_later(self._timeout_s, self._end_silent, protocol)
        return protocol

    def heard(self, protocol: RequestHandler) -> None:
        """A whole request head has come on this connection."""
        self._silent.discard(protocol)

    def _end_silent(self, protocol: RequestHandler) -> None:
        if protocol in self._silent:
            self._silent.discard(protocol)
            if protocol.transport is not None:
                protocol.transport.abort()

    def __repr__(self) -> str:
        return f"<ConnectionBound {len(self._server.connections)}/{self._connections_max}>"


class AdminConnection(RequestHandler):
    """aiohttp's side of one connection."""

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=KEEPALIVE_TIMEOUT_S,
            logger=logger,
            access_log=None,  # type: ignore[arg-type]  # aiohttp tests for it
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            auto_decompress=False,
        )

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what aiohttp could not parse, without a byte of it, which may be a token's."""
        is_defect = status >= 500  # what the handlers' own net has not caught
        level = logging.ERROR if is_defect else logging.INFO
        logger.log(level, "unreadable request: %s", type(exc).__name__)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer was begun already")
        response = problem_response(
            ObjectCacheError("a defect of the server; its log has the kind of the error")
            if is_defect
            else InvalidRequest(UNREADABLE, code="InvalidRequest")
        )
        name_the_server(response)
        response.force_close()
        return response


class _Refusal(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
