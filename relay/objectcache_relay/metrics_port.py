"""`GET /metrics` on a port of its own, which nobody signs, bounded as the other ports are.

Whoever reaches it is a stranger, so it has few places: the oldest connection goes for the newest,
and none holds a descriptor that engines need.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence

from aiohttp import web

from objectcache_gateway.answering.problems import ProblemConnection, problem_response
from objectcache_gateway.connections.accept_connections import Acceptor
from objectcache_gateway.connections.end_connections import ConnectionBound
from objectcache_runtime.metrics.metric_families import MetricsPage
from objectcache_schemas.errors import InvalidRequest, NotFound, ObjectCacheError

CONNECTIONS_MAX = 32  # some Prometheus servers, and whoever looks by hand
LINE_BYTES_MAX = 8 << 10
LINGERING_S = 1.0  # for a body, which nobody reads
PATH = "/metrics"
METHODS = ("GET", "HEAD")
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger("objectcache.relay.metrics")


class MetricsPort:
    """Serves a page from `start` to `close`."""

    def __init__(self, page: MetricsPage, name: str) -> None:
        """`name` is the command's, for the header that says who answers."""
        self._page = page
        self._server_name = f"ObjectCache-{name}"
        self._server = web.Server(self._answer)
        self._acceptor: Acceptor[MetricsConnection] | None = None
        self._bound: ConnectionBound | None = None

    def start(self, listeners: Sequence[socket.socket]) -> None:
        """Serve on these sockets, which it closes in the end."""
        self._bound = bound = ConnectionBound(CONNECTIONS_MAX, logger)
        bound.start()
        self._acceptor = Acceptor(
            listeners,
            lambda give_up: MetricsConnection(self._server, bound, give_up, self._name_the_process),
            None,
            bound.make_room,
        )
        self._acceptor.start()

    async def close(self) -> None:
        """End, and what is still asked with it."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor.abort()
        if self._bound is not None:
            self._bound.close()
        self._server.pre_shutdown()
        await self._server.shutdown(timeout=1.0)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await self._page_for(request)
        except ObjectCacheError as error:
            response = problem_response(error)
            if error.code == "MethodNotAllowed":
                response.headers["Allow"] = ", ".join(METHODS)
        except Exception:
            logger.exception("the metrics could not be written")
            response = problem_response(
                ObjectCacheError("a defect of this process; its log says more")
            )
        self._name_the_process(response)
        return response

    async def _page_for(self, request: web.BaseRequest) -> web.Response:
        if request.path != PATH:
            raise NotFound(f"there is {PATH} alone here", code="NoSuchEntity")
        if request.method not in METHODS:
            raise InvalidRequest(f"{PATH} takes {' and '.join(METHODS)}", code="MethodNotAllowed")
        text = await asyncio.get_running_loop().run_in_executor(None, self._page.text)
        return web.Response(body=text, headers={"Content-Type": PROMETHEUS_TEXT})

    def _name_the_process(self, response: web.StreamResponse) -> None:
        response.headers["Server"] = self._server_name
        response.headers["Cache-Control"] = "no-store"

    def __repr__(self) -> str:
        return f"<MetricsPort of {self._server_name}>"


class MetricsConnection(ProblemConnection):
    """aiohttp's side of one connection."""

    __slots__ = ()

    def __init__(
        self,
        server: web.Server,
        bound: ConnectionBound,
        give_up: Callable[[], None],
        name_response: Callable[[web.StreamResponse], None],
    ) -> None:
        super().__init__(
            server,
            bound,
            give_up,
            logger=logger,
            name_response=name_response,
            line_bytes_max=LINE_BYTES_MAX,
            lingering_s=LINGERING_S,
        )
