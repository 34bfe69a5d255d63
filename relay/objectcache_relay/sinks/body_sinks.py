"""Pieces that go on in a response's body, in order.

The system copies them out of landing memory, which is free again when it has: the connection may
keep them longer, and landing memory that it still had to read (as `sendfile` leaves it) would be
overwritten by the next delivery.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

from aiohttp import web

from objectcache_gateway.connections.client_socket import duplicate
from objectcache_relay.sinks.piece_sink import LandedPiece, PieceSink, WriteEnded
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError
from objectcache_schemas.limits import KIB, MIB

# Sent before others have the event loop, about a millisecond: an engine may take all there is.
TURN_BYTES_MAX = 4 * MIB
BUFFERED_BYTES_MAX = 256 * KIB  # between two looks at whether the engine takes it


def body_sink(
    transport: asyncio.Transport | None, response: web.StreamResponse, stall_timeout_s: float
) -> PieceSink:
    """The way into a response whose head was written to `transport`. `stall_timeout_s`
    (relay.fabric_timeout_s) is the longest that the engine may take nothing.
    """
    if transport is not None and not transport.get_write_buffer_size():
        descriptor = duplicate(transport)
        if descriptor is not None:
            return SocketSink(descriptor, stall_timeout_s)
    return BufferedSink(response, stall_timeout_s)


def _not_taken(stall_timeout_s: float) -> DeliveryFailed:
    return DeliveryFailed(
        f"the engine did not take the body, for {stall_timeout_s:g} s (relay.fabric_timeout_s) or "
        "at all"
    )


class SocketSink(PieceSink):
    """Written to the engine's own socket, past the connection's buffer. That one stays empty: the
    response has no other body.
    """

    def __init__(self, descriptor: int, stall_timeout_s: float) -> None:
        """`descriptor` is a duplicate of the socket's, which this closes."""
        self._descriptor = descriptor
        self._stall_timeout_s = stall_timeout_s
        self._loop = asyncio.get_running_loop()
        self._pieces: deque[tuple[memoryview, WriteEnded]] = deque()  # what is left of each
        self._failure: ObjectCacheError | None = None
        self._is_sending = False
        self._turn: asyncio.Handle | None = None  # the next one of this loop, once this one sent
        self._turn_bytes_left = TURN_BYTES_MAX
        self._stalled: asyncio.TimerHandle | None = None  # while the socket is full

    def write(self, piece: LandedPiece, ended: WriteEnded) -> None:
        if self._failure is not None:
            ended(self._failure)
            return
        self._pieces.append((piece.view, ended))
        if not self._is_sending and self._stalled is None:
            self._send()

    def announce(self, end_layer: int) -> None:
        """Layers are counted by their bytes."""

    def stop(self) -> None:
        self._fail(DeliveryFailed("the delivery was cancelled"))

    def close(self) -> None:
        self._wait_no_more()
        if self._turn is not None:
            self._turn.cancel()
        os.close(self._descriptor)

    def _send(self) -> None:
        """Send what the socket takes; called again when it takes more."""
        self._wait_no_more()
        self._is_sending = True
        try:
            self._send_what_fits()
        finally:
            self._is_sending = False

    def _send_what_fits(self) -> None:
        while self._pieces and self._turn_bytes_left:
            view, ended = self._pieces[0]
            try:
                count = os.write(self._descriptor, view[: self._turn_bytes_left])
            except BlockingIOError:
                self._wait()
                return
            except OSError:
                self._fail(_not_taken(self._stall_timeout_s))
                return
            self._spend(count)
            if count == len(view):
                self._pieces.popleft()
                ended(None)
            else:
                self._pieces[0] = (view[count:], ended)

    def _spend(self, count: int) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._begin_turn)
        self._turn_bytes_left -= count

    def _begin_turn(self) -> None:
        self._turn, self._turn_bytes_left = None, TURN_BYTES_MAX
        if self._stalled is None:
            self._send()

    def _wait(self) -> None:
        self._loop.add_writer(self._descriptor, self._send)
        self._stalled = self._loop.call_later(
            self._stall_timeout_s, self._fail, _not_taken(self._stall_timeout_s)
        )

    def _wait_no_more(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
            self._loop.remove_writer(self._descriptor)

    def _fail(self, failure: ObjectCacheError) -> None:
        """The first failure is that of all pieces that are left, and of those to come."""
        self._wait_no_more()
        self._failure = self._failure or failure
        while self._pieces:
            _, ended = self._pieces.popleft()
            ended(self._failure)


class BufferedSink(PieceSink):
    """Written through the connection, which may have TLS. Its buffer gets a copy."""

    def __init__(self, response: web.StreamResponse, stall_timeout_s: float) -> None:
        self._response = response
        self._stall_timeout_s = stall_timeout_s
        self._last: asyncio.Task[None] | None = None
        self._failure: ObjectCacheError | None = None

    def write(self, piece: LandedPiece, ended: WriteEnded) -> None:
        self._last = asyncio.create_task(self._send(self._last, piece, ended))

    async def _send(
        self,
        before: asyncio.Task[None] | None,
        piece: LandedPiece,
        ended: WriteEnded,
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        failure: ObjectCacheError | None = self._failure or _not_taken(self._stall_timeout_s)
        try:
            if self._failure is None:
                await self._send_now(piece)
                failure = None
        except (OSError, TimeoutError):
            pass
        finally:
            self._failure = failure
            ended(failure)

    async def _send_now(self, piece: LandedPiece) -> None:
        for begin in range(0, len(piece.view), BUFFERED_BYTES_MAX):
            async with asyncio.timeout(self._stall_timeout_s):
                await self._response.write(bytes(piece.view[begin : begin + BUFFERED_BYTES_MAX]))

    def announce(self, end_layer: int) -> None:
        """Layers are counted by their bytes."""
