"""The storage server's two sockets, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket as sockets
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path

from objectcache_runtime.first_of import end
from objectcache_runtime.networking.listening import HostPort, open_listeners, port_of
from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_runtime.networking.tls import (
    ReloadingContext,
    certificate_files,
    keep_reloading,
    mutual_server_context,
)
from objectcache_runtime.networking.unix_listeners import UnixListener, open_unix_listener
from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_storage_server.connections.gateway_connection import GatewayConnection
from objectcache_storage_server.connections.newcomers import Newcomers
from objectcache_storage_server.conversations.spread_sessions import SessionSpreader
from objectcache_storage_server.deliveries.session_gets import serve_session_get
from objectcache_storage_server.service import Service

BACKLOG = 1024
TUNNELS_TIMEOUT_S = 5.0
CLIENTS_PER_SESSION_MAX = 2  # connections to the target socket, joined or not

logger = logging.getLogger("objectcache.storage_server.server")


class StorageServer:
    """Listens for gateways and for clients' targets."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._connections: dict[asyncio.Task[None], GatewayConnection] = {}
        self._clients: set[asyncio.Task[None]] = set()
        self._unjoined: dict[asyncio.Task[None], None] = {}  # of them, the oldest first
        self._listeners: list[asyncio.Task[None]] = []
        self._unix_listeners: list[UnixListener] = []
        self._context: ReloadingContext | None = None
        self._newcomers = Newcomers()
        self._tunnels: set[asyncio.Future[None]] = set()
        service.sessions.serve_get = partial(serve_session_get, service.gets)

    async def start(self) -> None:
        """Bind both sockets, and storage.listen where it is set. Raises `InvalidRequest` for a path
        that is too long or certificates that are none, `Unavailable` where one cannot be bound, or
        is another process's.
        """
        settings = self._service.settings
        try:
            settings.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            reason = f"server.run_dir {settings.run_dir} cannot be made: {error.strerror}"
            raise Unavailable(reason) from error
        storage = settings.storage
        self._listen(settings.storage_socket, 0o600, self._serve_gateway)
        self._listen(settings.target_socket, int(storage.target_socket_mode, 8), self._serve_client)
        if storage.listen:
            self._listen_remote(settings)
        self._listeners.append(asyncio.create_task(self._service.gates.watch_slow_clients()))
        spreader = SessionSpreader(self._service.sessions, self._service.own)
        self._listeners.append(asyncio.create_task(spreader.run()))

    def _listen_remote(self, settings: Settings) -> None:
        """Take gateways of other hosts, which show a certificate of server.tls_ca."""
        server = settings.server
        if not server.tls_certificate or not server.tls_ca:
            raise InvalidRequest(
                "storage.listen is set, so server.tls_certificate and server.tls_ca must be, too: "
                "between hosts both sides show a certificate"
            )
        address = HostPort.parse("storage.listen", settings.storage.listen)
        files = certificate_files("server", server.tls_certificate, server.tls_key, server.tls_ca)
        self._context = mutual_server_context(files)
        for listener in open_listeners(address, "storage.listen"):
            logger.info("gateways of other hosts: port %d, mutual TLS", port_of(listener))
            self._listeners.append(asyncio.create_task(self._accept_remote(listener)))
        reloading = keep_reloading([self._context], settings.gateway.tls_reload_s)
        self._listeners.append(asyncio.create_task(reloading))

    def reload_certificate(self) -> None:
        """Read the certificate files again, where there are any."""
        if self._context is not None:
            self._context.reload()

    def _listen(
        self, path: Path, mode: int, serve: Callable[[StreamSocket], Awaitable[None]]
    ) -> None:
        listener = open_unix_listener(path, mode, BACKLOG, "server.run_dir")
        self._unix_listeners.append(listener)
        self._listeners.append(asyncio.create_task(self._accept(listener.socket, serve)))

    async def _accept_remote(self, listener: sockets.socket) -> None:
        async for connected in _connections(listener):
            asyncio.create_task(self._serve_remote(connected))  # noqa: RUF006 - kept below

    async def _serve_remote(self, connected: sockets.socket) -> None:
        """Serve a gateway once it has shown its certificate."""
        assert self._context is not None
        admitted = await self._newcomers.admit(connected, self._context)
        if admitted is None:
            return
        plain, ended = admitted
        self._tunnels.add(ended)
        ended.add_done_callback(self._tunnels.discard)
        await self._serve(plain, self._serve_gateway, passes_descriptors=False)

    async def _accept(
        self, listener: sockets.socket, serve: Callable[[StreamSocket], Awaitable[None]]
    ) -> None:
        async for connected in _connections(listener):
            asyncio.create_task(self._serve(connected, serve))  # noqa: RUF006 - kept below

    async def _serve(
        self,
        connected: sockets.socket,
        serve: Callable[[StreamSocket], Awaitable[None]],
        *,
        passes_descriptors: bool = True,
    ) -> None:
        stream = StreamSocket(connected, passes_descriptors=passes_descriptors)
        try:
            await serve(stream)
        except Exception:
            logger.exception("a connection failed")
        finally:
            stream.close()

    async def _serve_gateway(self, stream: StreamSocket) -> None:
        if len(self._connections) >= self._service.settings.storage.connections_max:
            error = Unavailable(
                f"storage.connections_max is {self._service.settings.storage.connections_max}"
            )
            with contextlib.suppress(OSError):
                await stream.send_frame(error.to_wire())
            return
        connection = GatewayConnection(self._service, stream)
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = connection
        self._service.counts.gateway_connections += 1
        try:
            await connection.serve()
        finally:
            self._service.counts.gateway_connections -= 1
            del self._connections[task]

    async def _serve_client(self, stream: StreamSocket) -> None:
        clients_max = CLIENTS_PER_SESSION_MAX * self._service.settings.storage.sessions_max
        if len(self._clients) >= clients_max:
            self._end_oldest_unjoined()
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        self._unjoined[task] = None
        self._service.counts.client_connections += 1
        try:
            await self._service.sessions.serve(stream, lambda: self._unjoined.pop(task, None))
        finally:
            self._service.counts.client_connections -= 1
            self._unjoined.pop(task, None)
            self._clients.discard(task)

    def _end_oldest_unjoined(self) -> None:
        """At the bound at least half have not joined: sessions have a bound of their own. Who means
        to join does so in milliseconds, and is not among those that are old.
        """
        oldest = next(iter(self._unjoined))
        del self._unjoined[oldest]
        self._clients.discard(oldest)
        oldest.cancel()

    async def left_by_gateways(self) -> None:
        """Return when no gateway is connected."""
        while self._connections:
            await asyncio.wait(set(self._connections))

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, let those under way finish within the time, then cut the rest."""
        self._service.gates.draining = True
        self._service.gates.entrance.close()
        for listener in self._listeners:
            listener.cancel()
        for unix_listener in self._unix_listeners:
            unix_listener.leave()
        for task, connection in list(self._connections.items()):
            if connection.idle:
                task.cancel()
        running = {*self._connections, *self._service.sessions.gets}
        if running:
            await asyncio.wait(running, timeout=timeout_s)
        gets = self._service.sessions.gets
        rest = [*self._connections, *gets, *self._clients, *self._listeners]
        await end(*rest)
        if self._tunnels:  # what was sent to other hosts is still on its way through this process
            await asyncio.wait(set(self._tunnels), timeout=TUNNELS_TIMEOUT_S)


async def _connections(listener: sockets.socket) -> AsyncGenerator[sockets.socket]:
    """Connections as they come; owns `listener`."""
    loop = asyncio.get_running_loop()
    with listener:
        while True:
            try:
                connected, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors: wait for some to be closed
                logger.error("cannot accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            yield connected
