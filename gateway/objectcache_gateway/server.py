"""The HTTP server: admission, authentication, dispatch, and the end of every request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from objectcache_gateway import client_socket
from objectcache_gateway.access.allowances import RequestAllowances
from objectcache_gateway.access.authorizer import Authorizer
from objectcache_gateway.access.bucket_cache import BucketCache
from objectcache_gateway.access.directory import AccessDirectory
from objectcache_gateway.access.permissions import NOBODY, Caller
from objectcache_gateway.access_log import log_access
from objectcache_gateway.audit_log import open_audit_log
from objectcache_gateway.exchange import (
    SERVER_NAME,
    Asked,
    Exchange,
    error_response,
    request_head,
)
from objectcache_gateway.handlers.buckets import check_expected_owner
from objectcache_gateway.handlers.operations import HANDLERS
from objectcache_gateway.health import HealthCheck, health_response, is_health_check
from objectcache_gateway.listening import Acceptor
from objectcache_gateway.metrics.levels import GatewayLevels
from objectcache_gateway.metrics.request_counts import RequestCounts
from objectcache_gateway.request.addressing import (
    Target,
    check_authority,
    resolve_address,
    split_target,
)
from objectcache_gateway.request.rdma_request import asked_rdma, declines_write
from objectcache_gateway.request.refusals import check_headers, refuse_preflight
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.request_ids import new_request_id
from objectcache_gateway.request.routes import route
from objectcache_gateway.signing.anonymous import anonymous, is_anonymous
from objectcache_gateway.signing.credentials import CredentialStore
from objectcache_gateway.signing.sigv4 import Authenticated, SigningKeys, authenticate
from objectcache_gateway.staging_memory import StagingMemory
from objectcache_gateway.storage_address import storage_address
from objectcache_gateway.storage_connection import StoragePool
from objectcache_gateway.tracing import RequestTracer
from objectcache_schemas import headers
from objectcache_schemas.errors import (
    Busy,
    InvalidRequest,
    ObjectCacheError,
    Unavailable,
    Unsupported,
)
from objectcache_schemas.messages import Bucket, Health, Object, RequestsTaken
from objectcache_schemas.settings import Settings

# A key of 1,024 bytes triples when it is encoded, and a presigned query comes on top.
LINE_BYTES_MAX = 32 << 10
HEADER_NAME_BYTES = 1 << 10  # beside a descriptor of the largest size, so that its own limit speaks
READ_BUFFER_BYTES = 256 << 10
# A connection lives on after an early answer where no more than this of the body is to come.
REST_KEEPING_BYTES_MAX = 64 << 10
# What a client may still send after an early answer, so that it reads the answer and not a reset.
DRAIN_BYTES_MAX = 8 << 20
DRAIN_TIMEOUT_S = 2.0
# A connection that is idle for so long while the gateway drains is not about to be used.
QUIET_S = 0.25
NO_FAULT_STATUSES = (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.SERVICE_UNAVAILABLE)
REFUSED_CONNECTIONS_FACTOR = 2  # above this multiple of connections_max there is not even an answer

logger = logging.getLogger("objectcache.gateway.server")


class ClientConnection(RequestHandler):
    """aiohttp's side of one client connection."""

    def __init__(self, server: HttpServer, settings: Settings) -> None:
        descriptor_bytes_max = settings.limits.descriptor_header_bytes_max
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=settings.gateway.keepalive_timeout_s,
            logger=logger,
            access_log=None,  # type: ignore[arg-type]  # aiohttp tests for it
            max_line_size=LINE_BYTES_MAX,
            max_field_size=max(LINE_BYTES_MAX, descriptor_bytes_max + HEADER_NAME_BYTES),
            lingering_time=0.0,  # the gateway drains by bytes as well as by time
            read_bufsize=READ_BUFFER_BYTES,
            auto_decompress=False,  # an object's bytes are what was sent
        )
        self._server = server
        self.is_excess = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Admit the connection, or mark it to be refused at its first request."""
        tcp = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        # With no high-water mark a drained transport is an empty one: its buffers may be reused,
        # and its socket may be handed over. TLS pauses at the mark, not above it, so that a mark of
        # 0 would pause an empty transport for good.
        high_bytes = 0 if tcp.get_extra_info("sslcontext") is None else 1
        tcp.set_write_buffer_limits(high=high_bytes, low=0)
        super().connection_made(transport)
        count, connections_max = self._server.count_connection(1), self._server.connections_max
        self.is_excess = count > connections_max
        self._server.counts.accepted_connections += 1
        self._server.counts.refused_connections += self.is_excess
        if count > connections_max * REFUSED_CONNECTIONS_FACTOR:
            tcp.abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        self._server.count_connection(-1)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what aiohttp could not parse, without a byte of it."""
        logger.info("unreadable request: %s", type(exc).__name__)
        self._server.counts.unreadable += 1
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
    """Makes `ClientConnection`s and counts them."""

    def __init__(self, gateway: Gateway, settings: Settings) -> None:
        super().__init__(gateway.handle, handler_cancellation=True)
        self.connections_max = settings.gateway.connections_max
        self.counts = gateway.counts
        self._settings = settings
        self._connection_count = 0

    @property
    def connection_count(self) -> int:
        """Client connections that are open."""
        return self._connection_count

    def count_connection(self, change: int) -> int:
        """Count a connection that came or went; returns how many are open."""
        self._connection_count += change
        return self._connection_count

    def __call__(self) -> RequestHandler:
        """A protocol for a connection that was just accepted."""
        return ClientConnection(self, self._settings)


class _Flight:
    """One request's count among those in flight; it leaves once."""

    def __init__(self, left: Callable[[], None]) -> None:
        self._left: Callable[[], None] | None = left

    def leave(self) -> None:
        """Count it no more. Repeating has no effect."""
        left, self._left = self._left, None
        if left is not None:
            left()


class Gateway:
    """S3 over HTTP in front of one storage server. Holds no state that outlives a request."""

    def __init__(
        self,
        settings: Settings,
        credentials: CredentialStore,
        tracer: RequestTracer | None = None,
    ) -> None:
        gateway = settings.gateway
        self.counts = RequestCounts(settings.admin.tenants_in_metrics_max)
        self.audit_log = open_audit_log(gateway)
        self._tracer = tracer or RequestTracer()
        self._settings = settings
        self._credentials = credentials
        self._signing_keys = SigningKeys()
        self.storage_address = storage_address(settings)
        self._storage = StoragePool(
            self.storage_address,
            settings.limits,
            gateway.storage_connections_max,
            gateway.storage_timeout_s,
        )
        self._directory = AccessDirectory(self._storage.connect)
        credentials.follow(self._directory)
        self._authorizer = Authorizer(
            BucketCache(lambda request: self._storage.call(request, Bucket), self._directory),
            (lambda request: self._storage.call(request, Object)) if gateway.acls else None,
        )
        self._allowances = RequestAllowances(
            lambda request: self._storage.call(request, RequestsTaken)
        )
        self._health = HealthCheck(lambda request: self._storage.call(request, Health))
        self._staging = StagingMemory()
        self._requests_in_flight = 0
        self._none_in_flight = asyncio.Event()
        self._none_in_flight.set()
        self._draining = False
        self._http: HttpServer | None = None
        self._acceptor: Acceptor | None = None
        self._request_begun = asyncio.Event()

    # --- life ---

    async def start(
        self, listeners: Sequence[socket.socket], tls: ssl.SSLContext | None = None
    ) -> None:
        """Serve `listeners`, which the gateway closes in the end; HTTPS with `tls`."""
        self._directory.start()
        self._http = HttpServer(self, self._settings)
        connections_max = self._settings.gateway.connections_max
        self._acceptor = Acceptor(listeners, self._http, tls, connections_max)
        self._acceptor.start()
        if self.audit_log is not None:
            self.audit_log.start()

    async def drain(self, timeout_s: float) -> None:
        """Accept what waits and then no more, finish the requests in flight within the time, and
        end. Every response asks its client to close; idle connections are closed at the end.
        """
        assert self._http is not None
        assert self._acceptor is not None
        self._draining = True
        self._acceptor.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._quiet()
        self._acceptor.abort()
        self._http.pre_shutdown()
        await self._http.shutdown(timeout=0.1)
        await self._directory.close()
        self._storage.close()
        if self.audit_log is not None:
            await self.audit_log.close()

    async def _quiet(self) -> None:
        """Wait until no request is in flight and clients that are at work have left: a client that
        sends into a connection that closes reads a reset.
        """
        assert self._http is not None
        assert self._acceptor is not None
        await self._acceptor.connected()
        await self._none_in_flight.wait()
        while self._http.count_connection(0):
            self._request_begun.clear()
            try:
                async with asyncio.timeout(QUIET_S):
                    await self._request_begun.wait()
            except TimeoutError:
                return
            await self._none_in_flight.wait()

    # --- requests ---

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve one request to its end, errors included. Only a lost client is raised."""
        flight = _Flight(self._left_flight)
        exchange = Exchange(
            request,
            self._settings,
            self._storage,
            self._staging,
            lambda: self._draining,
            flight.leave,
            self._credentials.identity_for,
        )
        status: int | str = "aborted"
        span = self._tracer.begin(exchange)
        self._requests_in_flight += 1
        self._request_begun.set()
        self._none_in_flight.clear()
        try:
            response = await self._respond(exchange)
            await self._finish(exchange, response)
            status = response.status
        finally:
            flight.leave()
            self._account(exchange, status)
            self._tracer.end(span, exchange, status)
        # The request is answered, so what its client still sends takes no other request's place.
        # aiohttp closes the connection where the body's end is not reached.
        await _drain(request)
        return response

    def _left_flight(self) -> None:
        self._requests_in_flight -= 1
        if not self._requests_in_flight:
            self._none_in_flight.set()

    def _account(self, exchange: Exchange, status: int | str) -> None:
        """Count and log a request that has ended."""
        asked, elapsed_s = exchange.asked, exchange.elapsed_s
        self.counts.ended(
            asked.operation if asked else None,
            asked.identity if asked else None,
            status,
            exchange.error_code,
            exchange.first_byte_s,
            elapsed_s,
            exchange.received_bytes,
            exchange.sent_bytes,
        )
        if exchange.matched is not None:
            self.counts.matched(exchange.identity, *exchange.matched)
        if exchange.rdma_declined:
            self.counts.rdma_declines[exchange.operation.value] += 1
        if exchange.refused_by:
            self.counts.quota_refusals[exchange.refused_by] += 1
        log_access(exchange, status, elapsed_s)
        if self.audit_log is not None:
            self.audit_log.record(exchange, status, elapsed_s)

    async def _respond(self, exchange: Exchange) -> web.StreamResponse:
        """The handler's response, or that of its error. Cuts the connection where an error comes
        after the response's first byte.
        """
        try:
            return await self._serve(exchange)
        except ObjectCacheError as error:
            failure = error
            _log_failure(exchange, error)
        except ConnectionError:
            raise  # the client is gone; the storage connection's own are translated
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            failure = ObjectCacheError("a defect of the server; its log has this request id")
        if exchange.response is not None:
            if exchange.request.transport is not None:
                client_socket.cut(exchange.request.transport)
            raise ConnectionResetError("the response could not be completed") from failure
        return exchange.error(failure)

    async def _serve(self, exchange: Exchange) -> web.StreamResponse:
        request = exchange.request
        target = split_target(request.raw_path)
        if is_health_check(request, target):
            return health_response(exchange, await self._health.state())
        self._admit(request)
        if request.method == "OPTIONS":
            refuse_preflight(request.headers.get)
        caller = await self._caller(exchange, target)
        await self._authorize(exchange, caller)
        check_headers(exchange.head, exchange.operation, acls=self._settings.gateway.acls)
        check_body_headers(exchange.head)
        await check_expected_owner(exchange)
        if self._declines_rdma(exchange) and declines_write(exchange.operation):
            return exchange.declined_write()
        return await HANDLERS[exchange.operation](exchange)

    def _declines_rdma(self, exchange: Exchange) -> bool:
        """Whether the request asks for a transfer by RDMA, which is then noted as declined."""
        is_signed = bool(exchange.authenticated.access_key)
        token = asked_rdma(exchange.head, exchange.operation, is_signed=is_signed)
        exchange.rdma_declined = token is not None
        return exchange.rdma_declined

    def _admit(self, request: web.BaseRequest) -> None:
        """Raise `Busy` where a limit on connections or requests is reached."""
        gateway = self._settings.gateway
        connection = request.protocol
        if isinstance(connection, ClientConnection) and connection.is_excess:
            raise Busy("gateway.connections_max is reached", retry_after_s=1.0)
        if self._requests_in_flight > gateway.requests_in_flight_max:
            raise Busy("gateway.requests_in_flight_max is reached", retry_after_s=1.0)

    async def _caller(self, exchange: Exchange, target: Target) -> Caller:
        """Who asks. Until the accounts are known only the root key is; others wait a little."""
        try:
            return self._authenticate(exchange, target)
        except Unavailable:
            await self._directory.wait_loaded()
            return self._authenticate(exchange, target)

    async def _authorize(self, exchange: Exchange, caller: Caller) -> None:
        """Decide whether the caller may ask now, may do this, and may do it now."""
        await self._allowances.spend_of_caller(caller)
        access = await self._authorizer.authorize(
            caller, exchange.operation, exchange.address, exchange.query
        )
        exchange.permit(access)
        await self._allowances.spend_of_bucket(access.bucket)

    def _authenticate(self, exchange: Exchange, target: Target) -> Caller:
        """Establish what is asked and who asks."""
        head = request_head(exchange.request, target.raw_path, target.raw_query)
        host = head.header("host") or ""
        check_authority(target, host)
        gateway = self._settings.gateway
        authenticated, caller = self._signer(head)
        address = resolve_address(head.raw_path, host, gateway.virtual_host_domains)
        query = first_values(head)
        names = frozenset(name for name, _ in head.headers)
        operation = route(head.method, address, query, names)
        asked = Asked(address, operation, authenticated, caller.identity)
        exchange.establish(head, query, asked)
        return caller

    def _signer(self, head: RequestHead) -> tuple[Authenticated, Caller]:
        """How the request was signed, and by whom."""
        gateway = self._settings.gateway
        if gateway.acls and is_anonymous(head):
            return anonymous(head), NOBODY
        authenticated = authenticate(
            head,
            self._credentials.secret_for,
            time.time(),
            gateway.clock_skew_s,
            region=gateway.region if gateway.strict_region else None,
            signing_keys=self._signing_keys,
        )
        return authenticated, self._credentials.caller_for(authenticated.access_key)

    async def _finish(self, exchange: Exchange, response: web.StreamResponse) -> None:
        """Send what is left of the response, and say in it whether the connection goes on."""
        request = exchange.request
        if exchange.response is None:
            if not _connection_can_go_on(exchange):
                response.force_close()
            if isinstance(response, web.Response) and response.body is not None:
                exchange.sent_bytes = response.content_length or 0
        watch = client_socket.SendWatch(
            request.transport, self._settings.gateway.body_stall_timeout_s
        )
        with watch:
            if exchange.response is None:
                await exchange.start(response)
            if exchange.last_bytes:
                await response.write_eof(exchange.last_bytes)
            else:  # a session's takes none
                await response.write_eof()

    def levels(self) -> GatewayLevels:
        """How much of everything there is right now."""
        return GatewayLevels(
            requests_in_flight=self._requests_in_flight,
            connections=self._http.connection_count if self._http else 0,
            storage_connections_in_use=self._storage.in_use,
            storage_connections_idle=self._storage.idle,
            draining=self._draining,
            audit_lines=self.audit_log.written_lines if self.audit_log else 0,
            audit_lines_lost=self.audit_log.lost_lines if self.audit_log else 0,
        )

    def __repr__(self) -> str:
        return f"<Gateway {self._requests_in_flight} requests in flight, {self._storage!r}>"


def first_values(head: RequestHead) -> Mapping[str, str]:
    """The first value of each query name."""
    values: dict[str, str] = {}
    for name, value in head.query:
        values.setdefault(name, value)
    return values


def check_body_headers(head: RequestHead) -> None:
    """Refuse what says something about the body that this server does not understand.

    Raises `Unsupported` for a transfer encoding other than chunked. An expectation other than
    100-continue is left unheeded, as in S3; RFC 9110 allows that.
    """
    transfer_encoding = head.header("transfer-encoding")
    if transfer_encoding is not None and transfer_encoding.strip().lower() != "chunked":
        raise Unsupported("the only transfer encoding that is supported is chunked")


def failure_level(http_status: int) -> int:
    """How loudly an answer of 5xx is logged: what is not served, and what is refused for now, is no
    warning, since a client could fill the log with it.
    """
    return logging.INFO if http_status in NO_FAULT_STATUSES else logging.WARNING


def _log_failure(exchange: Exchange, error: ObjectCacheError) -> None:
    """Log what this server or the storage server failed at.
    A body in progress is no failure of theirs to report: the storage server ends one whose client
    takes no byte, and looks then as it does when it ends itself.
    """
    if exchange.response is not None:
        logger.info(
            "request %s: the body was cut because the client or the storage server ended it: %r",
            exchange.request_id,
            error,
        )
    elif error.row.http_status >= 500:
        level = failure_level(error.row.http_status)
        logger.log(level, "request %s: %r", exchange.request_id, error)


def _connection_can_go_on(exchange: Exchange) -> bool:
    """Whether the request's body is at its end, or so nearly that the rest may be forgotten."""
    content = exchange.request.content
    if content.exception() is not None:
        return False  # its end cannot be found
    if content.is_eof():
        return True
    is_withheld = "Expect" in exchange.request.headers and exchange.received_bytes == 0
    if exchange.body_stalled or is_withheld:
        return False  # nobody knows whether the body will come
    length_bytes = exchange.request.content_length
    return (
        length_bytes is not None
        and length_bytes - exchange.received_bytes <= REST_KEEPING_BYTES_MAX
    )


async def _drain(request: web.BaseRequest) -> None:
    """Read and forget what is left of a body, within bounds."""
    if request.content.at_eof():
        return
    left_bytes = DRAIN_BYTES_MAX
    with contextlib.suppress(TimeoutError, web.RequestPayloadError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while left_bytes > 0 and not request.content.at_eof():
                left_bytes -= len(await request.content.readany())
