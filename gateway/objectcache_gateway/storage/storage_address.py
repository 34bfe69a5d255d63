"""Where the storage server is: a unix socket on this host, or TLS to another one."""

from __future__ import annotations

import asyncio
import errno
import socket
from abc import ABC, abstractmethod
from pathlib import Path

from objectcache_runtime.networking import tls_tunnel
from objectcache_runtime.networking.listening import HostPort
from objectcache_runtime.networking.tls import (
    ReloadingContext,
    certificate_files,
    mutual_client_context,
)
from objectcache_runtime.settings import Settings
from objectcache_schemas.errors import Busy, InvalidRequest, Unavailable

SOCKET_BUFFER_BYTES = 1 << 20  # lets a data frame leave in one call where the system allows it
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

OTHER_CONNECTIONS = 64  # of the admin server, and of gateways that follow the accounts


class StorageAddress(ABC):
    """Makes connections to one storage server."""

    passes_descriptors: bool  # whether a file descriptor can be sent beside a message

    @abstractmethod
    async def connect(self) -> socket.socket:
        """A connected socket that does not block. Raises `OSError` or `TimeoutError` where nobody
        answers, `Busy` where this process has no descriptor left.
        """


class UnixAddress(StorageAddress):
    """A unix socket."""

    passes_descriptors = True

    def __init__(self, path: Path) -> None:
        self._path = path

    async def connect(self) -> socket.socket:
        connected = _new_socket()
        try:
            connected.setblocking(False)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            await asyncio.get_running_loop().sock_connect(connected, str(self._path))
        except BaseException:
            connected.close()
            raise
        return connected

    def __str__(self) -> str:
        return str(self._path)


class TlsAddress(StorageAddress):
    """Another host, with certificates on both sides."""

    passes_descriptors = False

    def __init__(self, address: HostPort, context: ReloadingContext) -> None:
        self._address = address
        self._context = context

    async def connect(self) -> socket.socket:
        try:
            return await tls_tunnel.dial(self._address.host, self._address.port, self._context)
        except OSError as error:
            _raise_if_out_of_descriptors(error)
            raise

    def __str__(self) -> str:
        return str(self._address)


class StorageAddresses:
    """Addresses of storage servers, of which those on other hosts share one certificate."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._context: ReloadingContext | None = None

    @property
    def contexts(self) -> list[ReloadingContext]:
        """To be kept reloading by whoever runs the process; none where no certificate is set."""
        server = self._settings.server
        return [self._shown("")] if server.tls_certificate and server.tls_ca else []

    def configured(self) -> list[StorageAddress]:
        """Those that the settings name: `gateway.storage_addresses`, else `server.storage_address`,
        else the socket in RUN_DIR. Raises `InvalidRequest` where TLS is not set up whole.
        """
        several = self._settings.gateway.storage_addresses
        if several:
            return [self._one("gateway.storage_addresses", text) for text in several]
        if self._settings.server.storage_address:
            return [self.remote(self._settings.server.storage_address)]
        return [UnixAddress(self._settings.storage_socket)]

    def remote(self, text: str, setting: str = "server.storage_address") -> StorageAddress:
        """host:port of another host. Raises `InvalidRequest` that names the setting."""
        address = HostPort.parse(setting, text)
        if not address.host or not address.port:
            raise InvalidRequest(f"{setting} must name a host and a port, got {text!r}")
        return TlsAddress(address, self._shown(setting))

    def _one(self, setting: str, text: str) -> StorageAddress:
        return UnixAddress(Path(text)) if text.startswith("/") else self.remote(text, setting)

    def _shown(self, setting: str) -> ReloadingContext:
        server = self._settings.server
        if not server.tls_certificate or not server.tls_ca:
            raise InvalidRequest(
                f"{setting} is set, so server.tls_certificate and server.tls_ca must be, too: "
                "between hosts both sides show a certificate"
            )
        if self._context is None:
            files = certificate_files(
                "server", server.tls_certificate, server.tls_key, server.tls_ca
            )
            self._context = mutual_client_context(files)
        return self._context


def storage_connections_max(settings: Settings) -> int:
    """How many connections a gateway process uses: all processes of a host together leave those of
    sessions and of the admin server to them, so that none finds the storage server full.
    """
    storage, gateway = settings.storage, settings.gateway
    left = storage.connections_max - storage.sessions_max - OTHER_CONNECTIONS
    return max(1, min(gateway.storage_connections_max, left // gateway.processes))


def _new_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        _raise_if_out_of_descriptors(error)
        raise Unavailable("no socket to the storage server can be made") from error


def _raise_if_out_of_descriptors(error: OSError) -> None:
    if error.errno in _OUT_OF_DESCRIPTORS:
        raise Busy(
            "the gateway has no file descriptor left; raise its limit (ulimit -n)",
            retry_after_s=1.0,
        ) from error
