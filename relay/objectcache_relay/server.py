"""The relay's HTTP server: who asks has the job's key, and asks for what is stored to be delivered.

Everything else is the gateway's. `GET /relay/report` says how busy the relay is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from objectcache.channel.access_key import SigningKey
from objectcache.sessions.fabric_joining import FabricSettings
from objectcache.sessions.target_session import own_host_id
from objectcache_encodings.lossy import dtype_of_text
from objectcache_fabrics.leased_memory import RemoteTargetMemory
from objectcache_gateway.answering.http_exchange import error_response
from objectcache_gateway.bodies.drain import drain_body
from objectcache_gateway.client_connection import ClientConnection, HttpServer
from objectcache_gateway.connections.accept_connections import Acceptor
from objectcache_gateway.connections.client_socket import cut
from objectcache_gateway.connections.end_connections import BoundConnection
from objectcache_gateway.metrics.request_counts import RequestCounts
from objectcache_gateway.request.addressing import resolve_address
from objectcache_gateway.request.delivery_headers import forced_path, traceparent
from objectcache_gateway.request.request_head import RequestHead, wire_bytes
from objectcache_gateway.signing.sigv4 import Authenticated, SigningKeys
from objectcache_relay.decoding.decoded_regions import DecodedRegions
from objectcache_relay.decoding.decoded_sink import DecodedSink
from objectcache_relay.decoding.worker_pool import WorkerPool
from objectcache_relay.decoding.worker_sink import WorkerSink
from objectcache_relay.forward_get import ForwardedGet, ForwardMeans, PeerLine
from objectcache_relay.forwarding import ForwardingEnd
from objectcache_relay.landing.asked_encodings import AskedEncodings
from objectcache_relay.landing.forward_spans import ForwardTracer
from objectcache_relay.landing.landed_prefixes import Landings
from objectcache_relay.landing.landing_grants import DELIVERIES_MAX
from objectcache_relay.landing.node_name import node_of
from objectcache_relay.landing.upstream import SMALL_REQUESTS_MAX, AskedForward, Upstream
from objectcache_relay.relay_exchange import RelayExchange
from objectcache_relay.sessions import EngineSocket, RelaySessions
from objectcache_relay.sinks.body_sinks import body_sink
from objectcache_relay.sinks.piece_sink import PieceSink
from objectcache_relay.sinks.target_sinks import FabricSink, MemoryFileSink
from objectcache_relay.target_gets import JOB, TargetGets
from objectcache_runtime.settings import Settings
from objectcache_schemas import headers
from objectcache_schemas.delivery_paths import parse_path
from objectcache_schemas.descriptor import (
    DESCRIPTOR_VERSION,
    DeliveryOutcome,
    Descriptor,
    MatchRequest,
    descriptor_header_bytes,
)
from objectcache_schemas.errors import Busy, InvalidRequest, ObjectCacheError, Unsupported
from objectcache_schemas.operators.relay_report import REPORT_PATH, RelayReport
from objectcache_storage_server.conversations.tickets import TICKET_LIFE_S
from objectcache_storage_server.transports.targets import Lease, TargetRegistry

# Each may wait for its delivery's turn upstream; the rest lets others end meanwhile.
UPSTREAM_THREADS = DELIVERIES_MAX + SMALL_REQUESTS_MAX
RELAY = "relay"  # in the place of a fetcher
COPYING_THREADS = 2  # into memory files
SESSION_GETS_PASS_S = 60.0

logger = logging.getLogger("objectcache.relay.server")


class SessionInvitation(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the answer to `POST /?kv-session`."""

    v: int
    ticket: bytes
    socket_path: str
    host_id: str
    expires_s: float


class Relay:
    """Serves engines. Holds landing memory, and nothing that outlives a delivery."""

    def __init__(
        self,
        settings: Settings,
        key: SigningKey,
        tls: ssl.SSLContext | None = None,
        pool: WorkerPool | None = None,
        tracer: ForwardTracer | None = None,
        kind: str = RELAY,
    ) -> None:
        """`tls` is whom to trust at an https endpoint. With a `pool`, which it closes at its end,
        workers write into memory files. `tracer` makes spans of gets; `kind` is the process's.
        Raises `InvalidRequest` for an endpoint or a node's name that is none.
        """
        relay, storage = settings.relay, settings.storage
        self._settings = settings
        self._key = key
        self._kind = kind
        self._signing_keys = SigningKeys()
        self._threads = ThreadPoolExecutor(UPSTREAM_THREADS, "upstream")
        self._copying = ThreadPoolExecutor(COPYING_THREADS, "copying")
        self.pool = pool
        self.decoded_regions = DecodedRegions(relay.in_flight_bytes_max)
        fabric = FabricSettings(
            storage.nixl_devices, storage.nixl_ucx, relay.verbs_device or storage.verbs_device
        )
        landings = Landings(
            Upstream(
                relay.endpoint,
                key,
                fabric,
                relay.transport,
                tls,
                relay.nic or None,
                relay.nic_bytes_per_s or None,
                lands_in_files=pool is not None,
                relayed_by=f"{kind}:{node_of(relay)}",
            ),
            relay.landing_bytes,
            relay.wait_s if pool is None else settings.fetcher.wait_s,
            relay.hold_s,
            self._threads,
        )
        self.means = ForwardMeans(
            landings,
            relay.in_flight_bytes_max,
            tracer or ForwardTracer(None),
            has_rings=pool is not None,
        )
        encodings = AskedEncodings()
        if pool is not None:
            encodings = AskedEncodings(settings.fetcher.encodings, pool.workers)
        registry = TargetRegistry(storage.targets_bytes_max)
        self._gets = TargetGets(
            self.means,
            registry,
            self._target_sink,
            SESSION_GETS_PASS_S,
            encodings,
            dequantises=pool is not None,
        )
        self.sessions = RelaySessions(settings, registry, self._gets, kind)
        self._carried: set[asyncio.Task[ForwardingEnd]] = set()
        self._http: HttpServer | None = None
        self._acceptor: Acceptor[ClientConnection] | None = None

    def _target_sink(self, lease: Lease, tag: int, get: ForwardedGet) -> PieceSink:
        if isinstance(lease.target.memory, RemoteTargetMemory):
            return self._decoded(FabricSink(lease, tag), get)
        if self.pool is None:
            return MemoryFileSink(lease, tag, self._copying)
        return WorkerSink(lease, tag, self.pool, get)

    def _decoded(self, sink: PieceSink, get: ForwardedGet) -> PieceSink:
        """The way on for what workers decode, where there are some."""
        if self.pool is None:
            return sink
        return DecodedSink(sink, self.pool, self.decoded_regions, get)

    async def start(
        self,
        listeners: list[socket.socket],
        tls: ssl.SSLContext | None = None,
        engines: EngineSocket | None = None,
    ) -> None:
        """Serve these sockets, with HTTPS where `tls` is given, and engines of this host at
        `engines`.
        """
        if engines is not None:
            self.sessions.listen(engines)
        self._http = HttpServer(
            self._handle, self._settings, RequestCounts(0), self._settings.relay.connections_max
        )
        self._http.bound.start()
        self._acceptor = Acceptor(listeners, self._http.connection, tls, self._http.bound.make_room)
        self._acceptor.start()

    async def drain(self, timeout_s: float) -> None:
        """Begin no delivery any more, let those under way finish within the time, and end."""
        self.means.is_draining = True
        running: set[asyncio.Task[Any]] = {*self._carried, *self.sessions.gets}
        if running:
            await asyncio.wait(running, timeout=timeout_s)
        for get in set(self.means.gets):
            get.gone.set()
        if self._http is not None and self._acceptor is not None:
            self._acceptor.close()
            self._acceptor.abort()
            self._http.bound.close()
            self._http.pre_shutdown()
            await self._http.shutdown(timeout=1.0)
        await self.sessions.close()
        rest: set[asyncio.Task[Any]] = {*self._carried, *self.sessions.gets}
        if rest:
            await asyncio.wait(rest)
        await self.means.landings.close()
        if self.pool is not None:
            await self.pool.close()
        await asyncio.get_running_loop().run_in_executor(self._threads, self._close)
        self._threads.shutdown(wait=False)
        self._copying.shutdown(wait=False)

    def _close(self) -> None:
        self.decoded_regions.close()
        self.means.landings.regions.close()
        self.means.landings.upstream.close()

    def report(self) -> RelayReport:
        """How busy it is."""
        means, landings = self.means, self.means.landings
        return RelayReport(
            read_queue_bytes=landings.read_queue_bytes,
            landing_free_bytes=landings.grants.free_bytes,
            landing_bytes=landings.grants.capacity_bytes,
            rate_bytes_per_s=landings.rate_bytes_per_s,
            deliveries=len(means.gets),
            is_draining=means.is_draining,
            moved_bytes=landings.moved_bytes,
        )

    # --- requests ---

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        exchange = RelayExchange(self._settings, request)
        self._mark(request)
        try:
            response = await self._respond(exchange)
        finally:
            assert isinstance(request.protocol, BoundConnection)
            request.protocol.request_ends(stays_known=exchange.is_signed)
        if not request.content.at_eof():  # refused early: the answer goes before the rest is read
            response.force_close()
            await response.prepare(request)
            await response.write_eof()
            await drain_body(request)
        return response

    async def _respond(self, exchange: RelayExchange) -> web.StreamResponse:
        """The response, errors included. Cuts the connection where one comes too late."""
        request = exchange.request
        try:
            return await self._serve(exchange)
        except ObjectCacheError as error:
            failure = error
        except ConnectionError:
            raise
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            failure = ObjectCacheError(f"a defect of the {self._kind}; its log has this request id")
        if exchange.has_begun:
            if request.transport is not None:
                cut(request.transport)
            raise ConnectionResetError("the response could not be completed") from failure
        return error_response(failure, request.method, request.raw_path, exchange.named)

    def _mark(self, request: web.BaseRequest) -> None:
        """Give what is sent the DSCP of relay.ip_dscp."""
        dscp = self._settings.relay.ip_dscp
        transport = request.transport
        connected = transport.get_extra_info("socket") if transport is not None else None
        if not dscp or connected is None:
            return
        with contextlib.suppress(OSError):
            if connected.family == socket.AF_INET6:
                connected.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
            else:
                connected.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)

    async def _serve(self, exchange: RelayExchange) -> web.StreamResponse:
        request = exchange.request
        if request.method == "GET" and request.raw_path == "/healthz":
            return web.Response(text="ok\n", headers=exchange.named)
        authenticated = exchange.authenticated(self._secret_for, self._signing_keys)
        assert isinstance(request.protocol, BoundConnection)
        if not request.protocol.request_begins(JOB):
            raise Busy(
                f"{self._settings.relay.connections_max} connections are open already "
                "(relay.connections_max)",
                retry_after_s=1.0,
            )
        self._refuse_circle(exchange.head)
        head, query = exchange.head, {name for name, _ in exchange.head.query}
        if request.method == "GET" and head.raw_path == REPORT_PATH:
            self.means.landings.counts.asked.add(())
            return _json(exchange, self.report())
        if head.raw_path == "/" and headers.KV_SESSION in query:
            return await self._session(exchange, authenticated)
        address = resolve_address(head.raw_path, head.header("host") or "", ())
        if address.bucket is None:
            raise self._not_here()
        bucket, key = address.bucket, address.key
        match (request.method, key):
            case ("GET", None) if headers.KV_LAYOUT in query:
                found = await self._upstream(self.means.landings.upstream.layout, bucket)
                return exchange.msgpack(found)
            case ("POST", None) if headers.KV_MATCH in query:
                body = await exchange.read_body(authenticated)
                keys = MatchRequest.keys_from_bytes(body, self._settings.limits)
                return exchange.msgpack(
                    await self._upstream(self.means.landings.upstream.match, bucket, keys)
                )
            case ("POST", None) if headers.KV_GET in query:
                body = await exchange.read_body(authenticated)
                return await self._deliver(exchange, bucket, body)
            case ("GET", str()) if head.header(headers.DESCRIPTOR) is not None:
                header = head.header(headers.DESCRIPTOR) or ""
                data = descriptor_header_bytes(header, self._settings.limits)
                return await self._deliver(exchange, bucket, data, key)
            case _:
                raise self._not_here()

    def _not_here(self) -> Unsupported:
        return Unsupported(
            f"a {self._kind} serves gets, matches, layouts and sessions; everything else is the "
            "gateway's"
        )

    def _secret_for(self, access_key: str) -> str | None:
        own = self._key
        is_own = hmac.compare_digest(wire_bytes(access_key), own.access_key.encode())
        return own.secret_key if is_own else None

    def _refuse_circle(self, head: RequestHead) -> None:
        """Relays ask gateways, and fetchers gateways or relays: so none is asked by way of others
        for what it asks itself, whatever names they have for each other.
        """
        asker = head.header(headers.RELAYED_BY)
        if asker is None or (self._kind == RELAY and not asker.startswith(f"{RELAY}:")):
            return
        raise Unsupported(
            f"this is a {self._kind}, and {asker[:128]!r} asks here: set its relay.endpoint to the "
            "gateway's URL"
        )

    async def _upstream(self, call: Callable[..., bytes], *arguments: object) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, call, *arguments)

    async def _session(
        self, exchange: RelayExchange, authenticated: Authenticated
    ) -> web.StreamResponse:
        if exchange.request.method == "GET":
            exchange.has_begun = True
            return await self.sessions.join(exchange.request, authenticated.access_key)
        path = self.sessions.socket_path
        if path is None:
            raise Unsupported(
                f"this {self._kind} takes no memory files: it has no server.run_dir for its socket"
            )
        invitation = SessionInvitation(
            v=DESCRIPTOR_VERSION,
            ticket=self.sessions.ticket(authenticated.access_key),
            socket_path=str(path),
            host_id=own_host_id(),
            expires_s=TICKET_LIFE_S,
        )
        return exchange.msgpack(msgspec.msgpack.encode(invitation))

    # --- gets ---

    async def _deliver(
        self, exchange: RelayExchange, bucket: str, data: bytes, key: str | None = None
    ) -> web.StreamResponse:
        descriptor = Descriptor.from_bytes(data, self._settings.limits)
        if key is not None and key != descriptor.chunk_keys[-1]:
            raise InvalidRequest(
                f"the last of chunk_keys is {descriptor.chunk_keys[-1]!r}, the path names {key!r}"
            )
        path = parse_path(forced_path(exchange.head))
        text = exchange.head.header(headers.DEQUANTISE)
        asked = AskedForward(
            bucket,
            descriptor,
            path,
            exchange.request_id,
            traceparent(exchange.head),
            lossy=None if text is None else dtype_of_text(text, headers.DEQUANTISE),
        )
        if descriptor.rdma_target is not None:
            return await self._into_target(exchange, asked)
        if asked.lossy is not None:
            raise Unsupported("bodies are not dequantised; join a session")
        return await self._into_body(exchange, asked)

    async def _into_body(self, exchange: RelayExchange, asked: AskedForward) -> web.StreamResponse:
        line = PeerLine(self.means.in_flight_bytes_max)
        asked = replace(asked, encodings=self._gets.encodings.of(asked.bucket))
        get = ForwardedGet(self.means, asked, line, "tcp")
        timeout_s = self._settings.relay.fabric_timeout_s

        async def open_body(get: ForwardedGet) -> PieceSink:
            response = await exchange.begin(get, "tcp", get.payload_bytes)
            return self._decoded(body_sink(exchange.request.transport, response, timeout_s), get)

        ended = await self._carry(get, get.run(open_body))
        self._gets.ended(get, ended)
        if ended.error is not None:
            raise ended.error
        return await exchange.finish(b"")

    async def _into_target(
        self, exchange: RelayExchange, asked: AskedForward
    ) -> web.StreamResponse:
        target_get = self._gets.get(asked)
        get = target_get.get
        begun = asyncio.Event()
        running = asyncio.ensure_future(self._carry(get, target_get.run(begun.set)))
        waiting = asyncio.ensure_future(begun.wait())
        try:
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
            if begun.is_set():
                target_get.pass_bucket()
                await exchange.begin(get, get.transport, None)
            ended = await running
        finally:
            waiting.cancel()
            if not running.done():
                get.gone.set()
                await asyncio.wait([running])
                _heard(running)
        outcome = DeliveryOutcome(
            v=DESCRIPTOR_VERSION,
            chunk_count=get.delivery.chunk_count,
            payload_bytes=0 if ended.error else get.payload_bytes,
            error_code=ended.error.code if ended.error else None,
            error_message=ended.error.message if ended.error else None,
            failed_layer=ended.end_layer if ended.error else None,
        )
        return await exchange.finish(msgspec.msgpack.encode(outcome))

    async def _carry(
        self, get: ForwardedGet, run: Coroutine[Any, Any, ForwardingEnd]
    ) -> ForwardingEnd:
        """Carry a get to its end. A caller that is cancelled, whose client is gone, ends it."""
        carrying = asyncio.create_task(run)
        self._carried.add(carrying)
        carrying.add_done_callback(self._carried.discard)
        try:
            return await asyncio.shield(carrying)
        except asyncio.CancelledError:
            get.gone.set()
            await asyncio.wait([carrying])
            _heard(carrying)
            raise

    def __repr__(self) -> str:
        return f"<Relay {self.means!r}>"


def _heard(ended: asyncio.Future[Any]) -> None:
    """Nobody is there any more to be told how it ended."""
    if not ended.cancelled():
        ended.exception()


def _json(exchange: RelayExchange, body: msgspec.Struct) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), content_type="application/json", headers=exchange.named
    )
