"""The HTTP server: admission, authentication, dispatch, and the end of every request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus

from aiohttp import web

from objectcache_gateway.access.allowances import RequestAllowances
from objectcache_gateway.access.authorizer import Authorizer
from objectcache_gateway.access.bucket_cache import BucketCache
from objectcache_gateway.access.directory import AccessDirectory
from objectcache_gateway.access.permissions import NOBODY, Caller
from objectcache_gateway.answering.buffer_path_memory import BufferPathMemory
from objectcache_gateway.answering.document_memory import DocumentMemory
from objectcache_gateway.answering.http_exchange import Asked, Exchange, request_head
from objectcache_gateway.audit.access_log import log_access
from objectcache_gateway.audit.audit_log import open_audit_log
from objectcache_gateway.bodies.drain import drain_body
from objectcache_gateway.client_connection import ClientConnection, HttpServer
from objectcache_gateway.connections import client_socket
from objectcache_gateway.connections.accept_connections import Acceptor
from objectcache_gateway.connections.request_places import RequestPlaces
from objectcache_gateway.connections.turned_away import TurnedAway
from objectcache_gateway.handlers.buckets.buckets import check_expected_owner
from objectcache_gateway.handlers.operations import COMPUTED_INSTEAD, HANDLERS
from objectcache_gateway.health_check import (
    HealthCheck,
    health_response,
    is_health_check,
    is_signed_health_check,
)
from objectcache_gateway.metrics.levels import GatewayLevels
from objectcache_gateway.metrics.request_counts import RequestCounts
from objectcache_gateway.refused_headers import check_headers, refuse_preflight
from objectcache_gateway.request.addressing import (
    RequestTarget,
    check_authority,
    resolve_address,
    split_target,
)
from objectcache_gateway.request.rdma_request import asked_rdma, declines_write
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.routes import route
from objectcache_gateway.request_spans import RequestTracer
from objectcache_gateway.signing.anonymous import anonymous, is_anonymous
from objectcache_gateway.signing.credentials import CredentialStore
from objectcache_gateway.signing.sigv4 import Authenticated, SigningKeys, authenticate
from objectcache_gateway.storage.follow_servers import ServerFollower
from objectcache_gateway.storage.storage_address import StorageAddresses, storage_connections_max
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_gateway.storage.storage_pool import without_waiting
from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import (
    Busy,
    ObjectCacheError,
    Unavailable,
    Unsupported,
)
from objectcache_schemas.messages.buckets import Bucket
from objectcache_schemas.messages.quotas import RequestsTaken
from objectcache_schemas.messages.reads import Object
from objectcache_schemas.operators.server_state import Health

# A connection lives on after an early answer where no more than this of the body is to come.
REST_KEEPING_BYTES_MAX = 64 << 10
# A connection that is idle for so long while the gateway drains is not about to be used.
QUIET_S = 0.25
TURNS = 10  # of the event loop; what has arrived is read in one, and its handling begins soon after
NO_FAULT_STATUSES = (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.SERVICE_UNAVAILABLE)

logger = logging.getLogger("objectcache.gateway.server")


class _Flight:
    """One request among those in flight, which it leaves once."""

    def __init__(self, left: Callable[[_Flight], None]) -> None:
        self._left: Callable[[_Flight], None] | None = left
        self._patience = asyncio.timeout(None)
        self._is_served = False
        self.exchange: Exchange | None = None
        self.tenant = ""  # once the request has a place

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing is done for it before more of its body arrives."""
        return self.exchange is not None and self.exchange.awaits_body

    def leave(self) -> None:
        """Count it no more. Repeating has no effect."""
        left, self._left = self._left, None
        if left is not None:
            left(self)

    async def served(self, response: Awaitable[web.StreamResponse]) -> web.StreamResponse:
        """The response; raises `Busy` where the request is given up meanwhile."""
        self._is_served = True
        try:
            async with self._patience:
                return await response
        except TimeoutError as error:
            if not self._patience.expired():
                raise
            raise Busy(
                "gateway.requests_in_flight_max is reached, and the request was given up for one "
                "of a user with fewer",
                retry_after_s=1.0,
            ) from error
        finally:
            self._is_served = False

    def give_up(self) -> None:
        """End it for another's sake: with an answer, unless that was begun."""
        if self._is_served:
            self._patience.reschedule(0.0)
        elif self.exchange is not None and self.exchange.request.transport is not None:
            client_socket.cut(self.exchange.request.transport)


class Gateway:
    """S3 over HTTP in front of the storage servers of one store. Holds no state that outlives a
    request.
    """

    def __init__(
        self,
        settings: Settings,
        credentials: CredentialStore,
        tracer: RequestTracer | None = None,
        connections_max: int | None = None,
    ) -> None:
        """`connections_max` in place of the setting, where descriptors do not suffice for it."""
        gateway = settings.gateway
        self._connections_max = connections_max or gateway.connections_max
        self.counts = RequestCounts(settings.admin.tenants_in_metrics_max)
        self.audit_log = open_audit_log(gateway)
        self._tracer = tracer or RequestTracer()
        self._settings = settings
        self._credentials = credentials
        self._signing_keys = SigningKeys()
        self.storage_addresses = StorageAddresses(settings)
        self._storage = StorageFleet(
            self.storage_addresses.configured(),
            settings.limits,
            storage_connections_max(settings),
            gateway.storage_timeout_s,
        )
        self._servers = ServerFollower(self._storage, self.storage_addresses.remote)
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
        self._staging = BufferPathMemory()
        self._documents = DocumentMemory(settings)
        self._requests_in_flight = 0
        self._places = RequestPlaces[_Flight](gateway.requests_in_flight_max)
        self._none_in_flight = asyncio.Event()
        self._none_in_flight.set()
        self._draining = False
        self._http: HttpServer | None = None
        self._acceptor: Acceptor[ClientConnection] | None = None
        self._request_begun = asyncio.Event()

    # --- life ---

    async def start(
        self, listeners: Sequence[socket.socket], tls: ssl.SSLContext | None = None
    ) -> None:
        """Serve `listeners`, which the gateway closes in the end; HTTPS with `tls`."""
        self._servers.start()
        self._directory.start()
        self._http = HttpServer(self.handle, self._settings, self.counts, self._connections_max)
        self._http.bound.start()
        self._acceptor = Acceptor(listeners, self._http.connection, tls, self._http.bound.make_room)
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
        self._http.bound.close()
        self._http.pre_shutdown()
        await self._http.shutdown(timeout=0.1)
        await self._directory.close()
        await self._servers.close()
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
        loop = asyncio.get_running_loop()
        while len(self._http.bound):
            self._request_begun.clear()
            began_s = loop.time()
            try:
                async with asyncio.timeout(QUIET_S):
                    await self._request_begun.wait()
            except TimeoutError:
                # Where this process stood still, so may have clients: they are given another while.
                is_late = loop.time() >= began_s + 2 * QUIET_S
                # The loop looks at the time before it reads what arrived while it did not turn.
                for _ in range(TURNS):
                    await asyncio.sleep(0)
                is_quiet = self._none_in_flight.is_set() and not self._request_begun.is_set()
                if is_quiet and not is_late:
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
            self._documents,
            lambda: self._draining,
            flight.leave,
            self._credentials.identity_for,
        )
        flight.exchange = exchange
        status: int | str = "aborted"
        span = self._tracer.begin(exchange)
        self._requests_in_flight += 1
        self._request_begun.set()
        self._none_in_flight.clear()
        try:
            response = await self._respond(exchange, flight)
            await self._finish(exchange, response)
            status = response.status
        finally:
            flight.leave()
            exchange.release_document()
            self._account(exchange, status)
            self._tracer.end(span, exchange, status)
            self._request_ends(exchange)
        # The request is answered, so what its client still sends takes no other request's place.
        # aiohttp closes the connection where the body's end is not reached.
        await drain_body(request)
        return response

    def _left_flight(self, flight: _Flight) -> None:
        self._places.leave(flight, flight.tenant)
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

    async def _respond(self, exchange: Exchange, flight: _Flight) -> web.StreamResponse:
        """The handler's response, or that of its error. Cuts the connection where an error comes
        after the response's first byte.
        """
        try:
            return await flight.served(self._serve(exchange, flight))
        except ObjectCacheError as error:
            if is_signed_health_check(exchange.request, error):
                return health_response(exchange, await self._health.state())
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

    async def _serve(self, exchange: Exchange, flight: _Flight) -> web.StreamResponse:
        request = exchange.request
        target = split_target(request.raw_path)
        if is_health_check(request, target):
            return health_response(exchange, await self._health.state())
        if request.method == "OPTIONS":
            refuse_preflight(request.headers.get)
        exchange.versions = self._directory.versions  # before anything is decided by them
        caller = await self._caller(exchange, target)
        self._admit(exchange, flight)
        if exchange.operation in COMPUTED_INSTEAD:
            with without_waiting():
                return await self._perform(exchange, caller)
        return await self._perform(exchange, caller)

    async def _perform(self, exchange: Exchange, caller: Caller) -> web.StreamResponse:
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

    def _admit(self, exchange: Exchange, flight: _Flight) -> None:
        """Give the request a place, and its connection one. It is known by now whose they are:
        what nobody signed takes no place of a request that somebody did. Raises `Busy`.
        """
        assert self._http is not None
        connection = exchange.request.protocol
        assert isinstance(connection, ClientConnection)
        if not connection.request_begins(exchange.identity):
            raise Busy(
                "gateway.connections_max is reached, and no user has more connections than this "
                "one",
                retry_after_s=1.0,
            )
        has_place, given_up = self._places.take(flight, exchange.identity)
        turned_away = self._http.bound.crowding.total
        if given_up is not None:
            turned_away.requests_ended += 1
            given_up.give_up()
        if not has_place:
            turned_away.requests_refused += 1
            raise Busy("gateway.requests_in_flight_max is reached", retry_after_s=1.0)
        flight.tenant = exchange.identity

    def _request_ends(self, exchange: Exchange) -> None:
        """The connection is idle now, and a stranger's again where nothing was signed."""
        connection = exchange.request.protocol
        if isinstance(connection, ClientConnection):
            is_signed = exchange.asked is not None and bool(exchange.authenticated.access_key)
            connection.request_ends(stays_known=is_signed)

    async def _caller(self, exchange: Exchange, target: RequestTarget) -> Caller:
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

    def _authenticate(self, exchange: Exchange, target: RequestTarget) -> Caller:
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
            former_key_for=self._credentials.former_key_for,
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
            connections=len(self._http.bound) if self._http else 0,
            strangers=self._http.bound.strangers if self._http else 0,
            turned_away=self._http.bound.crowding.total if self._http else TurnedAway(),
            crowded=self._http.bound.crowding.reason if self._http else "",
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
