"""The client's TCP socket below aiohttp's transport: its progress, a duplicate of it, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import Self

UNSENT_BYTES_MAX = 256 << 10  # of what is under way besides
CHECKS_PER_TIMEOUT = 4  # so a stall is noticed at most a quarter of the timeout late
_TCP_INFO_BYTES = 192
_BYTES_ACKED = struct.Struct("@Q")  # tcpi_bytes_acked of linux/tcp.h
_BYTES_ACKED_OFFSET = 120


def duplicate(transport: asyncio.BaseTransport) -> int | None:
    """A duplicate of a plain TCP connection's descriptor, which the caller closes.

    None where there is none that bytes may be written to directly: TLS, a closed connection, or no
    descriptor left.
    """
    if transport.get_extra_info("sslcontext") is not None:
        return None
    connected = transport.get_extra_info("socket")
    if connected is None or connected.fileno() < 0 or transport.is_closing():
        return None
    try:
        return os.dup(connected.fileno())
    except OSError:
        return None


def cut(transport: asyncio.Transport) -> None:
    """End the connection at once, also where another process holds a duplicate of it."""
    descriptor = duplicate(transport)
    if descriptor is not None:
        with contextlib.suppress(OSError), socket.socket(fileno=descriptor) as connected:
            connected.shutdown(socket.SHUT_RDWR)
    transport.abort()


def bound_unsent(transport: asyncio.BaseTransport) -> None:
    """Have the client's socket take a body in small steps, so that whoever sends it to us sees how
    fast the client is: without it the system takes megabytes at once, and then nothing.
    """
    connected = transport.get_extra_info("socket")
    if connected is None:
        return
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)


def acked_bytes(transport: asyncio.BaseTransport) -> int | None:
    """Bytes that the client's system has acknowledged since the connection began.

    None where this system does not say.
    """
    connected = transport.get_extra_info("socket")
    try:
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return None
    if len(info) < _BYTES_ACKED_OFFSET + _BYTES_ACKED.size:
        return None
    return int(_BYTES_ACKED.unpack_from(info, _BYTES_ACKED_OFFSET)[0])


def read_little(transport: asyncio.BaseTransport, buffer_bytes: int) -> None:
    """Have the system take at most about so many bytes ahead of who reads the connection, so that
    a turn of the loop reads no more of it. No effect where the connection is closed.
    """
    connected = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def give_up_after(transport: asyncio.BaseTransport, timeout_s: float) -> None:
    """Have the system end the connection when the client has taken nothing of what was sent for so
    long, also what is still on its way when this process has closed it. No effect where it has.
    """
    connected = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


class SendWatch:
    """Cuts a connection whose client acknowledges no byte for `timeout_s` while it is entered.

    It asks the system, so it sees bytes of this process and of one that holds a duplicate. Where
    the system gives no figure nothing is known against the client, and it is not cut.
    """

    def __init__(self, transport: asyncio.Transport | None, timeout_s: float) -> None:
        self._transport = transport
        self._interval_s = timeout_s / CHECKS_PER_TIMEOUT
        self._timer: asyncio.TimerHandle | None = None
        self._acked_bytes: int | None = None
        self._checks_without_progress = 0
        self.stalled = False

    def __enter__(self) -> Self:
        if self._transport is not None:
            self._arm()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._interval_s, self._check)

    def _check(self) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        now_bytes = acked_bytes(self._transport)
        if now_bytes is None or now_bytes != self._acked_bytes:
            self._acked_bytes, self._checks_without_progress = now_bytes, 0
        else:
            self._checks_without_progress += 1
        if self._checks_without_progress >= CHECKS_PER_TIMEOUT:
            self.stalled = True
            cut(self._transport)
        else:
            self._arm()
