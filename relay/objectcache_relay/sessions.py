"""Sessions with engines: over a WebSocket, or over the relay's own socket for those of its host."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import WSMsgType, web

from objectcache_encodings.lossy import dtype_of_text
from objectcache_relay.landing.upstream import AskedForward
from objectcache_relay.relay_fabrics import RelayFabrics
from objectcache_relay.target_gets import JOB, TargetGets
from objectcache_runtime.first_of import end, first_done
from objectcache_runtime.networking.stream_socket import ConnectionEnded, StreamSocket
from objectcache_runtime.networking.unix_listeners import UnixListener, open_unix_listener
from objectcache_runtime.settings import Settings
from objectcache_schemas import headers
from objectcache_schemas.delivery_paths import DeliveryPath, parse_path
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_schemas.messages.frames import LENGTH
from objectcache_schemas.messages.sessions import GetBegun, GetEnded, GetPrefix
from objectcache_storage_server.conversations.sessions import Session, SessionServer
from objectcache_storage_server.conversations.tickets import TicketBook
from objectcache_storage_server.transports.targets import TargetRegistry

MESSAGE_BYTES_MAX = 64 << 10  # of an engine; what registers memory is the longest
BACKLOG = 64
INTO_TARGETS = (
    "",
    *(path.value for path in (DeliveryPath.DIRECT, DeliveryPath.BATCH, DeliveryPath.AGG)),
)

_PEER = struct.Struct("@3i")  # process, user, group

logger = logging.getLogger("objectcache.relay.sessions")


@dataclass(frozen=True, slots=True)
class EngineSocket:
    """Where engines of this host join. With `users`, only processes of these: their numbers, as
    the system knows them.
    """

    path: Path
    users: frozenset[int] | None = None


class RelaySessions:
    """The storage server's own sessions, in which a get is one that is forwarded."""

    def __init__(
        self, settings: Settings, registry: TargetRegistry, gets: TargetGets, kind: str
    ) -> None:
        """`kind` is the process's."""
        self._settings = settings
        self._kind = kind
        self._gets = gets
        self.tickets = TicketBook()
        self.fabrics = RelayFabrics(settings)
        self._server = SessionServer(registry, self.fabrics, self.tickets, settings.storage)
        self._server.serve_get = self._serve_get
        self._carried: set[asyncio.Task[None]] = set()
        self._listener: UnixListener | None = None

    @property
    def gets(self) -> set[asyncio.Task[None]]:
        """Gets over sessions that have not ended."""
        return set(self._server.gets)

    # --- the socket for engines of this host ---

    def listen(self, engines: EngineSocket) -> None:
        """Take engines of this host. Raises as `open_unix_listener` does."""
        mode = int(self._settings.storage.target_socket_mode, 8)
        self._listener = open_unix_listener(engines.path, mode, BACKLOG, "server.run_dir")
        self._keep(asyncio.create_task(self._accept(self._listener.socket, engines.users)))

    @property
    def socket_path(self) -> Path | None:
        """Where engines of this host join; None: nowhere."""
        return None if self._listener is None else self._listener.path

    def ticket(self, access_key: str) -> bytes:
        """A ticket to the socket. Raises `Busy`."""
        return self.tickets.issue(JOB, time.monotonic(), access_key)

    async def _accept(self, listener: socket.socket, users: frozenset[int] | None) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connected, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of file descriptors: wait for some to be closed
                    logger.error("cannot accept: %s", error)
                    await asyncio.sleep(0.1)
                    continue
                if users is not None and (user := _user_of(connected)) not in users:
                    logger.warning("a process of user %d may not join (fetcher.users)", user)
                    connected.close()
                    continue
                self._keep(asyncio.create_task(self._serve(connected)))

    async def _serve(self, connected: socket.socket) -> None:
        stream = StreamSocket(connected)
        try:
            await self._server.serve(stream, lambda: None)
        except Exception:
            logger.exception("a connection failed")
        finally:
            stream.close()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)

    # --- WebSockets ---

    async def join(self, request: web.BaseRequest, access_key: str) -> web.StreamResponse:
        """Carry a session over a WebSocket, until either side ends it. Raises `InvalidRequest`
        where the request is no upgrade.
        """
        joined = web.WebSocketResponse(
            protocols=(headers.SESSION_PROTOCOL,),
            heartbeat=self._settings.gateway.session_heartbeat_s,
            compress=False,
            max_msg_size=MESSAGE_BYTES_MAX + 1,  # the library refuses what has as many
        )
        if not joined.can_prepare(request).ok:
            raise InvalidRequest("GET /?kv-session must upgrade to a WebSocket")
        await joined.prepare(request)
        async with self._carried_session(access_key) as stream:
            both = [
                asyncio.ensure_future(_to_session(joined, stream)),
                asyncio.ensure_future(_to_engine(joined, stream)),
            ]
            try:
                await first_done(*both)
            finally:
                await end(*both)
        await joined.close()
        return joined

    @asynccontextmanager
    async def _carried_session(self, access_key: str) -> AsyncGenerator[StreamSocket]:
        """A session's other end, which ends with the block."""
        ours, theirs = socket.socketpair()
        stream = StreamSocket(ours, passes_descriptors=False)
        inner = StreamSocket(theirs, passes_descriptors=False)

        async def carry() -> None:
            try:
                await self._server.serve_client_of_gateway(JOB, inner, access_key)
            except ObjectCacheError as error:
                with contextlib.suppress(OSError):
                    await inner.send_frame(error.to_wire())
            finally:
                inner.close()

        serving = asyncio.create_task(carry())
        try:
            yield stream
        finally:
            stream.close()
            await asyncio.wait([serving])

    # --- gets ---

    async def _serve_get(
        self, session: Session, request: GetPrefix, cancelled: asyncio.Event
    ) -> None:
        """Carry a get to its end, errors included."""
        try:
            ended = await self._forwarded(session, request, cancelled)
        except ObjectCacheError as error:
            ended = GetEnded(tag=request.tag, error=error.to_wire())
        except Exception:
            logger.exception("get %s failed", request.request_id)
            failure = ObjectCacheError(f"the {self._kind} failed; see its log")
            ended = GetEnded(tag=request.tag, error=failure.to_wire())
        session.post(ended)

    async def _forwarded(
        self, session: Session, request: GetPrefix, cancelled: asyncio.Event
    ) -> GetEnded:
        asked = self._asked(session, request)
        target_get = self._gets.get(asked)
        get = target_get.get
        watching = asyncio.create_task(_pass_event(cancelled, get.gone))

        def begun() -> None:
            delivery = get.delivery
            session.post(
                GetBegun(
                    tag=request.tag,
                    delivery=delivery.mode,
                    chunk_count=delivery.chunk_count,
                    rate_bytes_per_s=delivery.rate_bytes_per_s,
                    path=delivery.path or "",
                    window_source=delivery.window_source or "none",
                    content=delivery.content or "",
                )
            )

        try:
            ended = await target_get.run(begun)
        finally:
            await end(watching)
        if ended.error is None:
            return GetEnded(tag=request.tag, payload_bytes=get.payload_bytes)
        return GetEnded(tag=request.tag, error=ended.error.to_wire(), failed_layer=ended.end_layer)

    def _asked(self, session: Session, request: GetPrefix) -> AskedForward:
        descriptor = Descriptor.from_bytes(request.descriptor, self._settings.limits)
        target = descriptor.rdma_target
        if target is None or target.target_id not in session.targets or target.tag != request.tag:
            raise InvalidRequest(
                "rdma_target must name a target of this session, and the get's tag"
            )
        if request.path not in INTO_TARGETS:
            raise InvalidRequest("path must be direct, batch or agg, or empty")
        path = parse_path(request.path)
        return AskedForward(
            request.bucket,
            descriptor,
            path,
            request.request_id,
            request.traceparent,
            lossy=dtype_of_text(text, "dequantise") if (text := request.dequantise) else None,
        )

    async def close(self) -> None:
        """End all sessions."""
        await end(*self._carried)
        if self._listener is not None:
            self._listener.leave()
        self.fabrics.close()


def _user_of(connected: socket.socket) -> int:
    """Whose process is at the other end, as the system says."""
    peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    user: int = _PEER.unpack(peer)[1]
    return user


async def _pass_event(one: asyncio.Event, other: asyncio.Event) -> None:
    await one.wait()
    other.set()


async def _to_session(engine: web.WebSocketResponse, stream: StreamSocket) -> None:
    with contextlib.suppress(OSError):
        async for message in engine:
            if message.type is not WSMsgType.BINARY:
                return  # nothing of this protocol
            await stream.send_all(memoryview(LENGTH.pack(len(message.data)) + message.data))


async def _to_engine(engine: web.WebSocketResponse, stream: StreamSocket) -> None:
    """The first message says that the session has joined, which the upgrade says already."""
    is_first = True
    with contextlib.suppress(OSError, ConnectionEnded):
        while True:
            data = bytearray(await stream.receive_length())
            await stream.receive_into(memoryview(data))
            if not is_first:
                await engine.send_bytes(bytes(data))
            is_first = False
