"""The admin API's connections: how many there may be, and what is answered to what is no request.

Each socket has a bound of its own, so that strangers on TCP cannot keep the operator out of the
unix socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import web

from objectcache_gateway.admin.serving.problems import name_the_server, problem_response
from objectcache_gateway.connections.end_connections import BoundConnection, ConnectionBound
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError

CONNECTIONS_MAX = 256
HANDSHAKE_TIMEOUT_S = 5.0
KEEPALIVE_TIMEOUT_S = 75.0
LINE_BYTES_MAX = 16 << 10
HEAD_BYTES_MAX = 4 * LINE_BYTES_MAX
READ_BUFFER_BYTES = 64 << 10
LINGERING_S = 10.0
UNREADABLE = (
    f"the request is not HTTP/1.1, or a line of its head is over {LINE_BYTES_MAX} bytes; "
    "is it TLS on a port without?"
)

logger = logging.getLogger("objectcache.gateway.admin")


class AdminConnection(BoundConnection):
    """aiohttp's side of one connection."""

    __slots__ = ()

    def __init__(
        self,
        server: web.Server,
        bound: ConnectionBound | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            server,
            bound,
            give_up,
            logger=logger,
            keepalive_timeout_s=KEEPALIVE_TIMEOUT_S,
            line_bytes_max=LINE_BYTES_MAX,
            field_bytes_max=LINE_BYTES_MAX,
            head_bytes_max=HEAD_BYTES_MAX,
            read_buffer_bytes=READ_BUFFER_BYTES,
            lingering_s=LINGERING_S,
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
