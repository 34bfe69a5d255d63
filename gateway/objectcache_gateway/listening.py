"""Accepting connections from sockets that other processes may accept from as well.

Several gateways share one listening socket. Each takes one connection a turn of its event loop, so
that one that is busy leaves the next to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Callable, MutableMapping, Sequence

from objectcache_schemas.listening import (
    BACKLOG,
    HostPort,
    adopt_listeners,
    open_listeners,
    passed_descriptors,
    port_of,
)

HANDSHAKE_TIMEOUT_S = 10.0
ACCEPT_PAUSE_S = 0.1  # after a failure: there are no descriptors, and some are closed meanwhile

logger = logging.getLogger("objectcache.gateway.listening")


def find_listeners(
    listen: str, descriptors: Sequence[int], environment: MutableMapping[str, str]
) -> tuple[list[socket.socket], str]:
    """The sockets to serve, and the host:port to show: those of `descriptors`, else of systemd,
    else newly bound to `listen`. Raises `InvalidRequest` or `Unavailable`.
    """
    given = list(descriptors) or passed_descriptors(environment, os.getpid())
    if given:
        listeners = adopt_listeners(given)
        host, port = listeners[0].getsockname()[:2]
        return listeners, str(HostPort(host, port))
    address = HostPort.parse("gateway.listen", listen)
    listeners = open_listeners(address)
    return listeners, str(address.with_port(port_of(listeners[0])))


class Acceptor:
    """Accepts from `listeners`, which it closes in the end, and makes a protocol for each
    connection. At most `handshakes_max` connections may be within their TLS handshake.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        make_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshakes_max: int,
    ) -> None:
        self._listeners = list(listeners)
        self._make_protocol = make_protocol
        self._tls = tls
        self._handshakes_max = handshakes_max
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def connecting_count(self) -> int:
        """Connections that were accepted and have no protocol yet."""
        return len(self._connecting)

    def start(self) -> None:
        """Accept from now on."""
        for listener in self._listeners:
            self._watch(listener)

    def close(self) -> None:
        """Accept what waits, then no more. A second call has no effect."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            for _ in range(BACKLOG):
                if not self._accept(listener):
                    break
            listener.close()
        self._listeners.clear()
        self._closed = True

    async def connected(self) -> None:
        """Wait until what was accepted has its protocol or has failed."""
        while self._connecting:
            await asyncio.wait(self._connecting)

    def abort(self) -> None:
        """End what has no protocol yet."""
        for task in self._connecting:
            task.cancel()

    def _watch(self, listener: socket.socket) -> None:
        if not self._closed:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> bool:
        """Take one connection; false where none waits, or another process was faster."""
        try:
            connected, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return False
        except OSError as error:
            logger.error("cannot accept: %s", error.strerror)
            self._loop.remove_reader(listener.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._watch, listener)
            return False
        connected.setblocking(False)
        if len(self._connecting) >= self._handshakes_max:
            connected.close()
            return True
        task = self._loop.create_task(self._connect(connected))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, connected: socket.socket) -> None:
        timeout_s = None if self._tls is None else HANDSHAKE_TIMEOUT_S
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, connected, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except (
            OSError,
            TimeoutError,
        ) as error:  # plain HTTP, or a port scan
            logger.debug("no connection: %s", type(error).__name__)
            with contextlib.suppress(OSError):
                connected.close()

    def __repr__(self) -> str:
        return f"<Acceptor {len(self._listeners)} listeners, {len(self._connecting)} connecting>"
