"""The admin API's connections: how many there may be, and how long one may say nothing.

Each socket has a bound of its own, so that strangers on TCP cannot keep the operator out of the
unix socket. A connection on which nobody has shown good credentials is a stranger's: where there
are too many connections, the oldest idle stranger goes.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from objectcache_gateway.admin.problems import name_the_server, problem_response
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

CONNECTIONS_MAX = 256
FIRST_REQUEST_TIMEOUT_S = 15.0
CROWDED_TIMEOUT_S = 5.0  # in place of that, where half of the connections are taken
HANDSHAKE_TIMEOUT_S = 5.0
KEEPALIVE_TIMEOUT_S = 75.0
LINE_BYTES_MAX = 16 << 10
UNREADABLE = (
    f"the request is not HTTP/1.1, or a line of its head is over {LINE_BYTES_MAX} bytes; "
    "is it TLS on a port without?"
)

logger = logging.getLogger("objectcache.gateway.admin")


class ConnectionBound:
    """Makes the protocols of one socket's connections, and keeps them from being too many."""

    def __init__(
        self,
        server: web.Server,
        connections_max: int = CONNECTIONS_MAX,
        first_request_timeout_s: float = FIRST_REQUEST_TIMEOUT_S,
    ) -> None:
        self._server = server
        self._connections_max = connections_max
        self._timeout_s = first_request_timeout_s
        self._open: dict[AdminConnection, None] = {}  # the oldest first

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a connection that was just accepted."""
        return AdminConnection(self._server, self)

    def opened(self, connection: AdminConnection) -> bool:
        """Count a connection in, in an idle stranger's place if need be; false if it must go."""
        if len(self._open) >= self._connections_max and not self._end_stranger():
            return False
        self._open[connection] = None
        loop = asyncio.get_running_loop()
        loop.call_later(min(CROWDED_TIMEOUT_S, self._timeout_s), self._look_at, connection)
        loop.call_later(self._timeout_s, self._end_silent, connection)
        return True

    def lost(self, connection: AdminConnection) -> None:
        """Count a connection out, once."""
        self._open.pop(connection, None)

    def _look_at(self, connection: AdminConnection) -> None:
        if 2 * len(self._open) > self._connections_max:
            self._end_silent(connection)

    def _end_silent(self, connection: AdminConnection) -> None:
        if connection in self._open and not connection.has_asked:
            self._end(connection)

    def _end_stranger(self) -> bool:
        strangers = (one for one in self._open if one.is_idle_stranger)
        oldest = next(strangers, None)
        if oldest is not None:
            self._end(oldest)
        return oldest is not None

    def _end(self, connection: AdminConnection) -> None:
        self.lost(connection)
        if connection.transport is not None:
            connection.transport.abort()

    def __repr__(self) -> str:
        return f"<ConnectionBound {len(self._open)}/{self._connections_max}>"


class AdminConnection(RequestHandler):
    """aiohttp's side of one connection. With a bound, it counts itself in and out."""

    __slots__ = ("_bound", "_requests", "has_asked", "is_trusted")

    def __init__(self, server: web.Server, bound: ConnectionBound | None = None) -> None:
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
        self._bound = bound
        self._requests = 0  # that are being answered
        self.has_asked = False  # a whole request head has come
        self.is_trusted = False  # a request had good credentials

    @property
    def is_idle_stranger(self) -> bool:
        """Whether ending it harms nobody who may ask anything."""
        return not self.is_trusted and self._requests == 0

    def request_begins(self) -> None:
        """A whole request head has come."""
        self.has_asked = True
        self._requests += 1

    def request_ends(self) -> None:
        """A request was answered."""
        self._requests -= 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._bound is not None and not self._bound.opened(self):
            transport.abort()  # type: ignore[attr-defined]  # a stream's has it

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._bound is not None:
            self._bound.lost(self)
        super().connection_lost(exc)

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
