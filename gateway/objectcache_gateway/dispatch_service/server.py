"""HTTP around `ClusterState`: the token, bodies, errors, and leases that end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from objectcache_gateway.answering.problems import (
    JSON,
    ProblemConnection,
    in_words,
    problem_response,
)
from objectcache_gateway.connections.accept_connections import Acceptor
from objectcache_gateway.connections.end_connections import ConnectionBound
from objectcache_gateway.dispatch_service.cluster_state import ClusterState
from objectcache_gateway.dispatch_service.families import dispatch_families
from objectcache_gateway.dispatch_service.token import TokenCheck
from objectcache_runtime.metrics.metric_cells import SHORT_SECONDS, Counts, Histogram
from objectcache_runtime.metrics.metric_families import MetricsPage
from objectcache_schemas.errors import (
    Busy,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
)
from objectcache_schemas.limits import NAME_PATTERN, NAME_WORDS, ROUTE_WORDS
from objectcache_schemas.operators.dispatch_api import (
    DISPATCH_PATTERN_WORDS,
    LoadsReport,
    NodeRegistration,
    RelayRegistration,
    RouteRequest,
    SelectRequest,
    Undone,
)

CONNECTIONS_MAX = 4096  # a router's, and one of each node
BODY_BYTES_MAX = 1 << 20  # 8,192 loads are less
BODY_TIMEOUT_S = 10.0
BODIES_MAX = 256  # that are being read; the rest wait in their sockets
LINE_BYTES_MAX = 8 << 10
LINGERING_S = 5.0
EXPIRE_EVERY_S = 0.1
CALLER = "router"  # all who have the token are one to the connections' bound
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger("objectcache.gateway.dispatch")

Answer = msgspec.Struct | None
Act = Callable[[ClusterState, str, Any, float], Answer]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class DispatchRoute:
    """One call: `act` gets the state, the name in the path, the body and the time."""

    method: str
    path: str
    act: Act
    body: type[msgspec.Struct] | None = None
    status: int = 200
    decides: bool = False  # its time counts as a decision's
    is_conditional: bool = False  # whoever has the answer already is told that it holds


def _register(state: ClusterState, name: str, body: NodeRegistration, now_s: float) -> Answer:
    answer, undone = state.register(name, body, now_s)
    _tell(f"node {name} has changed", undone)
    return answer


def _register_relay(
    state: ClusterState, name: str, body: RelayRegistration, now_s: float
) -> Answer:
    if name in ROUTE_WORDS:
        raise InvalidRequest(f"a relay must not be called {name!r}, which is a word of routes")
    answer, undone = state.register_relay(name, body, now_s)
    _tell(f"node {name} has a relay", undone)
    return answer


def _remove(state: ClusterState, name: str, _: None, now_s: float) -> Answer:
    return state.remove(name, now_s)


RESERVATION = "/v1/reservations/{name}"
ROUTES = (
    DispatchRoute("PUT", "/v1/nodes/{name}", _register, NodeRegistration),
    DispatchRoute("DELETE", "/v1/nodes/{name}", _remove),
    DispatchRoute("PUT", "/v1/nodes/{name}/relay", _register_relay, RelayRegistration),
    DispatchRoute(
        "DELETE",
        "/v1/nodes/{name}/relay",
        lambda state, name, _, now_s: state.remove_relay(name, now_s),
    ),
    DispatchRoute("GET", "/v1/state", lambda state, _, __, now_s: state.state(now_s)),
    DispatchRoute(
        "GET",
        "/v1/relays",
        lambda state, _, __, ___: state.relays(),
        is_conditional=True,
    ),
    DispatchRoute(
        "POST",
        "/v1/select",
        lambda state, _, body, now_s: state.select(body, now_s),
        SelectRequest,
        decides=True,
    ),
    DispatchRoute(
        "POST",
        "/v1/route",
        lambda state, _, body, now_s: state.route(body, now_s),
        RouteRequest,
        decides=True,
    ),
    DispatchRoute(
        "POST",
        "/v1/submit",
        lambda state, _, body, now_s: state.submit(body, now_s),
        SelectRequest,
        status=202,
    ),
    DispatchRoute(
        "POST",
        "/v1/loads",
        lambda state, _, body, now_s: state.take_loads(body, now_s),
        LoadsReport,
    ),
    DispatchRoute(
        "POST", f"{RESERVATION}/read_done", lambda s, name, _, now_s: s.read_done(name, now_s)
    ),
    DispatchRoute(
        "POST", f"{RESERVATION}/prefill_done", lambda s, name, _, now_s: s.prefill_done(name, now_s)
    ),
    DispatchRoute("POST", f"{RESERVATION}/renew", lambda s, name, _, now_s: s.renew(name, now_s)),
    DispatchRoute(
        "POST",
        f"{RESERVATION}/complete",
        lambda s, name, _, now_s: s.end(name, "completed", now_s),
        status=204,
    ),
    DispatchRoute(
        "DELETE",
        RESERVATION,
        lambda s, name, _, now_s: s.end(name, "released", now_s),
        status=204,
    ),
)


class DispatchServer:
    """The service on its listening sockets."""

    def __init__(self, cluster: ClusterState, token: TokenCheck) -> None:
        self._cluster, self._token = cluster, token
        self._decision_seconds = Histogram(SHORT_SECONDS)
        self.requests = Counts[tuple[str, str]]()  # that were served, by method and path
        self._page = MetricsPage(
            lambda: dispatch_families(
                self._cluster, self._decision_seconds, self.requests, time.monotonic()
            )
        )
        self._bodies = 0
        application = web.Application(
            middlewares=[self._answer], client_max_size=BODY_BYTES_MAX + 1
        )
        for route in ROUTES:
            application.router.add_route(route.method, route.path, self._handler_of(route))
        application.router.add_route("GET", "/metrics", self._metrics)
        application.router.add_route("GET", "/healthz", self._healthz)
        self._runner = web.AppRunner(application)
        self._acceptor: Acceptor[DispatchConnection] | None = None
        self._bound: ConnectionBound | None = None
        self._expiry: asyncio.Task[None] | None = None

    async def start(
        self, listeners: Sequence[socket.socket], context: ssl.SSLContext | None
    ) -> None:
        """Serve on these sockets, which it closes in the end."""
        await self._runner.setup()
        assert self._runner.server is not None
        server = self._runner.server
        self._bound = bound = ConnectionBound(CONNECTIONS_MAX, logger)
        bound.start()
        self._acceptor = Acceptor(
            listeners,
            lambda give_up: DispatchConnection(server, bound, give_up),
            context,
            bound.make_room,
        )
        self._acceptor.start()
        self._expiry = asyncio.create_task(self._expire())

    async def close(self) -> None:
        """End, and what is still asked with it."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor.abort()
        if self._bound is not None:
            self._bound.close()
        await self._runner.cleanup()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            try:
                for name in self._cluster.expire(time.monotonic()):
                    logger.warning("node %s or its relay has not been heard of, and is lost", name)
            except Exception:  # a defect must not end the leases of all
                logger.exception("leases could not be ended")

    # --- requests ---

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except ObjectCacheError as error:
            response = problem_response(error)
        except web.HTTPException as error:
            response = _router_problem(request, error)
        except ConnectionError:
            raise
        except Exception:
            logger.exception("%s %s failed", request.method, request.path)
            response = problem_response(
                ObjectCacheError("a defect of the service; its log says more")
            )
        finally:
            assert isinstance(request.protocol, DispatchConnection)
            request.protocol.request_ends(stays_known=True)
        name_the_service(response)
        return response

    def _handler_of(self, route: DispatchRoute) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._let_in(request)
            name = _name_of(request)
            body = await self._body_of(route, request)
            begun_s = time.perf_counter()
            try:
                answer = route.act(self._cluster, name, body, time.monotonic())
            finally:
                if route.decides:
                    self._decision_seconds.observe(time.perf_counter() - begun_s)
            self.requests.add((route.method, route.path))
            if route.is_conditional:
                return _unless_known(answer, request.headers.get("If-None-Match", ""))
            return _json(answer, route.status)

        return handle

    def _let_in(self, request: web.Request) -> None:
        self._token.check(request.headers.get("Authorization"))
        assert isinstance(request.protocol, DispatchConnection)
        if not request.protocol.request_begins(CALLER):
            raise Busy(f"{CONNECTIONS_MAX} connections are open already", retry_after_s=1.0)

    async def _body_of(self, route: DispatchRoute, request: web.Request) -> msgspec.Struct | None:
        if route.body is None:
            return None
        if self._bodies >= BODIES_MAX:
            raise Busy(f"{BODIES_MAX} bodies are being read already", retry_after_s=1.0)
        self._bodies += 1
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                data = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise InvalidRequest(
                f"the body is over {BODY_BYTES_MAX} bytes", code="EntityTooLarge"
            ) from error
        except TimeoutError as error:
            raise InvalidRequest("the body stopped arriving", code="RequestTimeout") from error
        except web.RequestPayloadError as error:
            raise InvalidRequest(
                "the body is not framed as HTTP/1.1 asks", code="InvalidRequest"
            ) from error
        finally:
            self._bodies -= 1
        try:
            return msgspec.json.decode(data, type=route.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            told = in_words(str(error), DISPATCH_PATTERN_WORDS)
            raise InvalidRequest(f"body: {told}") from error

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self._let_in(request)
        return web.Response(body=self._page.text(), headers={"Content-Type": PROMETHEUS_TEXT})

    async def _healthz(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    def __repr__(self) -> str:
        return f"<DispatchServer {self._cluster!r}>"


class DispatchConnection(ProblemConnection):
    """aiohttp's side of one connection."""

    __slots__ = ()

    def __init__(
        self, server: web.Server, bound: ConnectionBound, give_up: Callable[[], None]
    ) -> None:
        super().__init__(
            server,
            bound,
            give_up,
            logger=logger,
            name_response=name_the_service,
            line_bytes_max=LINE_BYTES_MAX,
            lingering_s=LINGERING_S,
        )


def name_the_service(response: web.StreamResponse) -> None:
    """Set the headers that every response has."""
    response.headers["Server"] = "ObjectCache-dispatch"
    response.headers["Cache-Control"] = "no-store"


def _name_of(request: web.Request) -> str:
    """The name in the path; nothing where it has none."""
    name = request.match_info.get("name")
    if name is not None and not re.match(NAME_PATTERN, name):
        raise InvalidRequest(f"the name in the path must be {NAME_WORDS}")
    return name or ""


def _json(answer: Answer, status: int) -> web.Response:
    if answer is None:
        return web.Response(status=status)
    return web.Response(status=status, body=msgspec.json.encode(answer), content_type=JSON)


def _unless_known(answer: Answer, known: str) -> web.Response:
    """The answer with its tag, or only that it is what the caller has (304)."""
    body = msgspec.json.encode(answer)
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    if tag in [one.strip().removeprefix("W/") for one in known.split(",")]:
        return web.Response(status=304, headers={"ETag": tag})
    return web.Response(body=body, content_type=JSON, headers={"ETag": tag})


def _router_problem(request: web.Request, error: web.HTTPException) -> web.Response:
    if isinstance(error, web.HTTPMethodNotAllowed):
        response = problem_response(
            InvalidRequest(
                f"{request.path} does not take {request.method}", code="MethodNotAllowed"
            )
        )
        response.headers["Allow"] = error.headers["Allow"]
        return response
    if isinstance(error, web.HTTPNotFound):
        known = ", ".join(sorted({route.path for route in ROUTES}))
        return problem_response(
            NotFound(f"there is no path {request.path!r}; there are {known}", code="NoSuchEntity")
        )
    return problem_response(InvalidRequest(error.reason))


def _tell(event: str, undone: Undone) -> None:
    if undone.lost or undone.rerouted:
        logger.warning(
            "%s: %d reservations are lost, %d have another route",
            event,
            len(undone.lost),
            len(undone.rerouted),
        )
