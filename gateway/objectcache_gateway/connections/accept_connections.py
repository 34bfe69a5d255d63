"""Accepting connections from sockets that other processes may accept from as well.

Several gateways share one listening socket. Each takes one connection a turn of its event loop, so
that one that is busy leaves the next to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import socket
import ssl
from collections.abc import Callable, MutableMapping, Sequence
from typing import Generic, Protocol, TypeVar, cast

from objectcache_runtime.networking.listening import (
    BACKLOG,
    HostPort,
    adopt_listeners,
    open_listeners,
    passed_descriptors,
    port_of,
)

HANDSHAKE_TIMEOUT_S = 10.0
ACCEPT_PAUSE_S = 0.1  # after a failure: there are no descriptors, and some are closed meanwhile
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
TELL_EVERY_S = 10.0

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
    listeners = open_listeners(address, "gateway.listen")
    return listeners, str(address.with_port(port_of(listeners[0])))


class Arriving(Protocol):
    """A connection that was accepted, as an asyncio protocol that is told its end in any case."""

    def never_made(self) -> None:
        """It has ended before `connection_made`."""
        ...


P = TypeVar("P", bound=Arriving)


class Acceptor(Generic[P]):
    """Accepts from `listeners`, which it closes in the end, and makes a protocol for each
    connection at once, before a TLS handshake. So whoever bounds the connections sees all.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        make_protocol: Callable[[Callable[[], None]], P],
        tls: ssl.SSLContext | None,
        make_room: Callable[[], bool] = lambda: False,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        """`make_protocol` gets what ends the connection as long as it is not made. `make_room` ends
        another one where no descriptor is left; false where it cannot.
        """
        self._listeners = list(listeners)
        self._make_protocol = make_protocol
        self._tls = tls
        self._make_room = make_room
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._told_s = -math.inf
        self._closed = False

    @property
    def connecting_count(self) -> int:
        """Connections that were accepted and are not made yet."""
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
        """Wait until what was accepted is made or has failed."""
        while self._connecting:
            await asyncio.wait(self._connecting)

    def abort(self) -> None:
        """End what is not made yet."""
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
            self._pause(listener, error)
            return False
        connected.setblocking(False)
        protocol = self._make_protocol(lambda: _shut(connected))
        task = self._loop.create_task(self._connect(connected, protocol))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return True

    def _pause(self, listener: socket.socket, error: OSError) -> None:
        """Accept nothing for a moment, in which a descriptor becomes free."""
        has_room = error.errno in NO_DESCRIPTOR and self._make_room()
        now_s = self._loop.time()
        if now_s >= self._told_s + TELL_EVERY_S:
            self._told_s = now_s
            logger.error("cannot accept: %s", error.strerror)
        self._loop.remove_reader(listener.fileno())
        # What was ended is closed in the loop's next turn.
        self._loop.call_later(0.0 if has_room else ACCEPT_PAUSE_S, self._watch, listener)

    async def _connect(self, connected: socket.socket, protocol: P) -> None:
        timeout_s = None if self._tls is None else self._handshake_timeout_s
        is_made = False
        try:
            await self._loop.connect_accepted_socket(
                lambda: cast(asyncio.Protocol, protocol),
                connected,
                ssl=self._tls,
                ssl_handshake_timeout=timeout_s,
            )
            is_made = True
        except (
            OSError,
            TimeoutError,
        ) as error:  # plain HTTP, or a port scan
            logger.debug("no connection: %s", type(error).__name__)
            with contextlib.suppress(OSError):
                connected.close()
        finally:
            if not is_made:
                protocol.never_made()

    def __repr__(self) -> str:
        return f"<Acceptor {len(self._listeners)} listeners, {len(self._connecting)} connecting>"


def _shut(connected: socket.socket) -> None:
    """Have the system end a connection whose descriptor the event loop has."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
