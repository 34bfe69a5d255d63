"""The admin API's connections: how many there may be, and what is answered to what is no request.

Each socket has a bound of its own, so that strangers on TCP cannot keep the operator out of the
unix socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import web

from objectcache_gateway.admin.serving.problems import name_the_server
from objectcache_gateway.answering.problems import ProblemConnection
from objectcache_gateway.connections.end_connections import ConnectionBound

CONNECTIONS_MAX = 256
HANDSHAKE_TIMEOUT_S = 5.0
LINE_BYTES_MAX = 16 << 10
LINGERING_S = 10.0

logger = logging.getLogger("objectcache.gateway.admin")


class AdminConnection(ProblemConnection):
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
            name_response=name_the_server,
            line_bytes_max=LINE_BYTES_MAX,
            lingering_s=LINGERING_S,
        )
