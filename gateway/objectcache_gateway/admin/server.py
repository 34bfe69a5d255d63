"""Serves the routes: credentials, scopes, bodies, errors, and the audit log around each."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from objectcache_gateway.admin.processes import status as status_page
from objectcache_gateway.admin.serving.admin_connections import (
    CONNECTIONS_MAX,
    HANDSHAKE_TIMEOUT_S,
    AdminConnection,
)
from objectcache_gateway.admin.serving.authentication import (
    BEARER,
    bearer_asker,
    bearer_refusal,
    check_body,
    peer_asker,
    signed_asker,
    unauthorized,
)
from objectcache_gateway.admin.serving.change_audit import ChangeAudit, audit_line, without_secrets
from objectcache_gateway.admin.serving.media_types import JSON
from objectcache_gateway.admin.serving.problems import name_the_server
from objectcache_gateway.admin.serving.read_requests import (
    decode_body,
    decode_query,
    read_body,
    request_head,
)
from objectcache_gateway.admin.serving.routes import ApiCaller, Call, Reach, Route
from objectcache_gateway.admin.serving.scopes import covers
from objectcache_gateway.answering.problems import problem_response
from objectcache_gateway.connections.accept_connections import Acceptor
from objectcache_gateway.connections.end_connections import ConnectionBound
from objectcache_gateway.signing.credentials import RootCredentials
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_schemas.errors import (
    AccessDenied,
    Busy,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unavailable,
)
from objectcache_schemas.messages.request_labels import new_request_id

REQUESTS_MAX = 64
SOCKET_MODE = 0o600

logger = logging.getLogger("objectcache.gateway.admin")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Account:
    """What the audit log will say of one request; filled as it becomes known."""

    request_id: str
    asker: ApiCaller | None = None
    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])
    refusal: str = ""  # why credentials do not suffice, for the log


class AdminServer:
    """The admin API on a unix socket, and on TCP where it is to listen."""

    def __init__(
        self, reach: Reach, root: RootCredentials, audit_log: ChangeAudit, routes: tuple[Route, ...]
    ) -> None:
        self._reach = reach
        self._root = root
        self._audit_log = audit_log
        self._requests_in_flight = 0
        self._acceptors: list[Acceptor[AdminConnection]] = []
        self._bounds: list[ConnectionBound] = []
        self._socket_file: tuple[Path, int] | None = None  # and which one it is
        self._runner = web.AppRunner(
            self._application(routes),
            handler_cancellation=True,
        )

    # --- life ---

    async def start(self, path: Path) -> None:
        """Listen on the unix socket, which is for the server's own user and root."""
        await self._runner.setup()
        self.listen(_unix_listener(path), None)
        self._socket_file = (path, os.stat(path).st_ino)

    def listen(self, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        """Listen there as well, with a bound of its own."""
        assert self._runner.server is not None, "start first"
        server, bound = self._runner.server, ConnectionBound(CONNECTIONS_MAX, logger)
        bound.start()
        self._bounds.append(bound)
        acceptor = Acceptor(
            [listener],
            lambda give_up: AdminConnection(server, bound, give_up),
            context,
            bound.make_room,
            HANDSHAKE_TIMEOUT_S,
        )
        acceptor.start()
        self._acceptors.append(acceptor)

    @property
    def storage(self) -> StorageFleet:
        """The storage servers that it reaches."""
        return self._reach.storage

    async def close(self) -> None:
        """End, and what is still asked with it."""
        if self._socket_file is not None:
            _remove_own(*self._socket_file)
        for acceptor in self._acceptors:
            acceptor.close()
            acceptor.abort()
        for bound in self._bounds:
            bound.close()
        await self._runner.cleanup()
        self._reach.storage.close()
        self._audit_log.close()

    # --- requests ---

    def _application(self, routes: tuple[Route, ...]) -> web.Application:
        application = web.Application(middlewares=[self._answer])
        application.on_response_prepare.append(_name_the_server)
        for route in routes:
            application.router.add_route(route.method, route.path, self._handler_of(route))
        return application

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The handler's response, or an error as JSON; aiohttp's own errors too."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            response = problem_response(_router_problem(request, error))
            if isinstance(error, web.HTTPMethodNotAllowed):
                response.headers["Allow"] = error.headers["Allow"]
            return response
        finally:
            assert isinstance(request.protocol, AdminConnection)
            request.protocol.request_ends(stays_known=True)

    def _handler_of(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            account = Account(new_request_id())
            code, status = "", 499  # where the client leaves before the end
            try:
                response = await self._serve(route, request, account)
                status = response.status
            except ObjectCacheError as error:
                response = problem_response(error)
                if response.status == 401 and status_page.is_status(request.path):
                    response.headers["WWW-Authenticate"] = status_page.CHALLENGE
                code, status = error.code, response.status
            except ConnectionError:
                raise
            except Exception:
                logger.exception("request %s failed", account.request_id)
                response = problem_response(
                    ObjectCacheError(f"a defect of the server; see {account.request_id} in its log")
                )
                code, status = "InternalError", 500
            finally:
                self._log(route, request, account, status, code)
            return response

        return handle

    async def _serve(
        self, route: Route, request: web.Request, account: Account
    ) -> web.StreamResponse:
        """The answer. Whoever shows no credentials takes no request's place, and what it sends as a
        body is not waited for.
        """
        if route.scope is None:
            return await self._answered(route, request, account, b"")
        try:
            account.asker, sha256 = await self._authenticate(request)
        except AccessDenied as error:
            account.refusal = self._why_refused(request, error)
            raise
        _keep(request, account.asker)
        if not covers(account.asker.scopes, route.scope):
            account.refusal = f"{account.asker.name} lacks the scope {route.scope}"
            raise AccessDenied(f"this needs the scope {route.scope!r}")
        if self._requests_in_flight >= REQUESTS_MAX:
            raise Busy(f"{REQUESTS_MAX} requests are served already", retry_after_s=1.0)
        self._requests_in_flight += 1
        try:
            data = await read_body(request, route.body_bytes_max)
            if sha256 is not None:
                _check_body(data, sha256, account)
            return await self._answered(route, request, account, data)
        finally:
            self._requests_in_flight -= 1

    async def _answered(
        self, route: Route, request: web.Request, account: Account, data: bytes
    ) -> web.StreamResponse:
        body = decode_body(data, route.body)
        account.asked = without_secrets(body)
        call = Call(
            self._reach,
            account.asker or ApiCaller("nobody", ()),
            {name: request.match_info[name] for name in route.parameter_names},
            body,
            decode_query(request, route.query),
            time.time(),
            request,
        )
        return _response(route, await _handled(route, call))

    async def _authenticate(self, request: web.Request) -> tuple[ApiCaller, str | None]:
        """Who asks, and the SHA-256 of the body where that was signed."""
        authorization = request.headers.get("Authorization")
        if authorization is None:
            return self._peer(request), None
        if status_page.is_status(request.path):
            authorization = status_page.as_bearer(authorization)
        if authorization.partition(" ")[0].lower() == BEARER:
            with contextlib.suppress(Unavailable):  # the tokens last known are in force
                await self._reach.accounts.look()
            tokens = self._reach.accounts.known.tokens
            return bearer_asker(authorization, tokens, time.time()), None
        skew_s = self._reach.settings.gateway.clock_skew_s
        return signed_asker(request_head(request), self._root, time.time(), skew_s)

    def _why_refused(self, request: web.Request, error: AccessDenied) -> str:
        authorization = request.headers.get("Authorization")
        if authorization is None:
            return "no credentials"
        if status_page.is_status(request.path):
            authorization = status_page.as_bearer(authorization)
        if authorization.partition(" ")[0].lower() == BEARER:
            return bearer_refusal(authorization, self._reach.accounts.known.tokens, time.time())
        cause = error.__cause__
        return cause.code if isinstance(cause, ObjectCacheError) else error.message

    def _peer(self, request: web.Request) -> ApiCaller:
        transport = request.transport
        connected = transport.get_extra_info("socket") if transport else None
        if connected is not None and connected.family == socket.AF_UNIX:
            found = peer_asker(connected, os.geteuid())
            if found is not None:
                return found
        raise unauthorized(
            "give a token as Authorization: Bearer TOKEN, or sign the request with the root key"
        )

    def _log(
        self, route: Route, request: web.Request, account: Account, status: int, code: str
    ) -> None:
        who = account.asker.name if account.asker else "nobody"
        origin = request.remote or "unix socket"
        if account.refusal:
            logger.warning(
                "%s %s from %s is refused: %s", route.method, route.path, origin, account.refusal
            )
        if route.changes and account.asker is not None:
            line = audit_line(
                now_s=time.time(),
                request_id=account.request_id,
                who=who,
                origin=origin,
                method=route.method,
                path=route.path,
                names=request.match_info,
                asked=account.asked,
                status=status,
                code=code,
            )
            self._audit_log.write(line)
        logger.debug("%s %s %d %s by %s", route.method, route.path, status, code, who)

    def __repr__(self) -> str:
        return f"<AdminServer {self._requests_in_flight} requests in flight>"


def _check_body(data: bytes, sha256: str, account: Account) -> None:
    try:
        check_body(data, sha256)
    except AccessDenied as error:
        account.refusal = error.message
        raise


def _keep(request: web.Request, asker: ApiCaller) -> None:
    """Whoever has shown good credentials keeps the connection. Raises `Busy` where others have as
    many as there may be.
    """
    assert isinstance(request.protocol, AdminConnection)
    if not request.protocol.request_begins(asker.name):
        raise Busy(f"{CONNECTIONS_MAX} connections are open already", retry_after_s=1.0)


async def _name_the_server(_: web.Request, response: web.StreamResponse) -> None:
    name_the_server(response)


def _unix_listener(path: Path) -> socket.socket:
    """A socket at the path, in place of one that an ended process has left."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(SOCKET_MODE)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {path}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def _remove_own(path: Path, inode: int) -> None:
    """Unless another process has put its own there."""
    with contextlib.suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


async def _handled(
    route: Route, call: Call[Any, Any]
) -> msgspec.Struct | web.StreamResponse | None:
    """The handler's answer; text that no message can carry is the caller's fault."""
    try:
        return await route.handler(call)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidRequest("a text is not Unicode, or a number is larger than 64 bits") from error


def _response(
    route: Route, answer: msgspec.Struct | web.StreamResponse | None
) -> web.StreamResponse:
    if isinstance(answer, web.StreamResponse):
        return answer
    if answer is None:
        return web.Response(status=route.status)
    return web.Response(
        status=route.status,
        body=msgspec.json.encode(answer),
        content_type=JSON,
    )


def _router_problem(request: web.Request, error: web.HTTPException) -> ObjectCacheError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return InvalidRequest(
            f"{request.path} does not take {request.method}", code="MethodNotAllowed"
        )
    if isinstance(error, web.HTTPNotFound):
        return NotFound(
            f"the admin API has no path {request.path!r}; /openapi.json lists all",
            code="NoSuchEntity",
        )
    return InvalidRequest(error.reason)
