"""A plain socket on this host whose bytes travel over TLS.

The code at both ends of the storage protocol owns plain sockets, waits for them and fills its own
memory from them; it stays as it is. Between two hosts each end gets one half of a socket pair, and
the event loop's TLS carries the bytes of the other half. What a plain socket cannot carry over, a
file descriptor, gets lost: whoever sends one asks before.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from typing import cast

HANDSHAKE_TIMEOUT_S = 10.0
BUFFER_BYTES = 1 << 20  # on its way through this process, in each direction
# A client that says nothing is asked by the kernel whether it is there: one whose host is gone, or
# whose farewell was lost, would have its connection, and what it was about to put, for good.
SILENCE_S, ASKED_EVERY_S, ASKED_TIMES = 30, 10, 3


class _Half(asyncio.Protocol):
    """Passes what arrives on its transport to the other half's."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._other: _Half | None = None

    def join(self, other: _Half) -> None:
        """Pass bytes on from now on, and end when the other ends. Both have their transport."""
        self._other, other._other = other, self
        for half in (self, other):
            assert half.transport is not None
            half.transport.set_write_buffer_limits(high=BUFFER_BYTES)
            half.transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self._other is not None and self._other.transport is not None:
            self._other.transport.write(data)

    def pause_writing(self) -> None:
        if self._other is not None and self._other.transport is not None:
            self._other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and self._other.transport is not None:
            self._other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.ended.set_result(None)
        if self._other is not None and self._other.transport is not None:
            self._other.transport.close()  # after what it still has to send


async def dial(host: str, port: int, context: ssl.SSLContext) -> socket.socket:
    """A plain socket to a TLS server, after the handshake.

    Raises `OSError`, of which `ssl.SSLError` is one, or `TimeoutError`.
    """
    loop = asyncio.get_running_loop()
    far = _Half()
    transport, _ = await loop.create_connection(
        lambda: far,
        host,
        port,
        ssl=context,
        server_hostname=host,
        ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
    )
    try:
        return await _joined(far)
    except BaseException:
        transport.close()
        raise


async def accept(
    connected: socket.socket,
    context: ssl.SSLContext,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> tuple[socket.socket, asyncio.Future[None]]:
    """A plain socket to the client of a connection that was accepted, after the handshake; and a
    future that is done when the connection has ended, all that was sent before included.

    Owns `connected`. Raises as `dial` does.
    """
    loop = asyncio.get_running_loop()
    far = _Half()
    try:
        _notice_end(connected)
        transport, _ = await loop.connect_accepted_socket(
            lambda: far, connected, ssl=context, ssl_handshake_timeout=handshake_timeout_s
        )
    except BaseException:
        connected.close()
        raise
    try:
        return await _joined(far), far.ended
    except BaseException:
        transport.close()
        raise


def _notice_end(connected: socket.socket) -> None:
    """Have a connection that is silent end within a minute of its client's host. What was sent and
    is not acknowledged is tried for as long as the system does, and the bounds of its request hold.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASKED_EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, ASKED_TIMES)


async def _joined(far: _Half) -> socket.socket:
    """Give the far half its near one; the caller's socket is the other end of that."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        for end in (ours, theirs):
            end.setblocking(False)
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        near = _Half()
        await asyncio.get_running_loop().create_unix_connection(lambda: near, sock=theirs)
        if far.transport is None:
            raise ConnectionResetError("the other side closed the connection")
        near.join(far)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    return ours
