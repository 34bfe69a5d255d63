"""Ends connections for others, by the rules of `connection_places`, and counts and logs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
from typing import cast

from aiohttp import web
from aiohttp.http import WebSocketReader
from aiohttp.web_protocol import RequestHandler

from objectcache_gateway.connections.client_socket import cut
from objectcache_gateway.connections.connection_places import ConnectionPlaces
from objectcache_gateway.connections.masked_frames import MaskedFrames
from objectcache_gateway.connections.turned_away import Crowding

CROWDED_TIMEOUT_S = 5.0  # to show a signature, where more than half of the places are taken
LOOK_S = 1.0
ENDED_A_LOOK_PART = 16
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


class ConnectionBound:
    """The connections of one process, or of one of its sockets. Call it within an event loop."""

    def __init__(self, places_max: int, logger: logging.Logger) -> None:
        self._loop = asyncio.get_running_loop()
        self._places = ConnectionPlaces[BoundConnection](places_max)
        self._logger = logger
        self._timer: asyncio.TimerHandle | None = None
        # Who is ended comes again, and all of them at once would keep others waiting.
        self._ended_a_look_max = max(1, places_max // ENDED_A_LOOK_PART)
        self.crowding = Crowding(self._loop.time())

    def __len__(self) -> int:
        return len(self._places)

    @property
    def strangers(self) -> int:
        """Connections on which nobody has shown a good signature."""
        return self._places.strangers

    def start(self) -> None:
        """Look after the connections from now on."""
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Look no more. Repeating has no effect."""
        if self._timer is not None:
            self._timer.cancel()

    def arrived(self, connection: BoundConnection) -> None:
        """Count in what was accepted, in the place of another if need be."""
        strangers = self._places.strangers
        ended = self._places.open(connection, self._loop.time())
        if self._places.strangers == strangers:
            self._end_stranger(ended)
        elif ended is not None:  # and the newcomer is one stranger more, so it was a tenant's
            self._end_of_tenant(ended)

    def make_room(self) -> bool:
        """End the oldest stranger, because no descriptor is left; false where there is none."""
        return self._end_stranger(self._places.oldest_stranger())

    def request_begins(self, connection: BoundConnection, tenant: str) -> bool:
        """Whether a request that was signed well may be served on its connection, in the place of
        another tenant's if need be.
        """
        has_place, ended = self._places.begin(connection, tenant)
        if ended is not None:
            self._end_of_tenant(ended)
        self.crowding.total.connections_refused += not has_place
        return has_place

    def request_ends(self, connection: BoundConnection, *, stays_known: bool) -> None:
        """The request has ended; its tenant keeps the connection where it stays known."""
        self._places.end(connection, self._loop.time(), stays_known=stays_known)

    def lost(self, connection: BoundConnection) -> None:
        """Count a connection out. Repeating has no effect."""
        self._places.lost(connection)

    def _end_of_tenant(self, connection: BoundConnection) -> None:
        self.crowding.total.tenants_ended += 1
        connection.end()

    def _end_stranger(self, stranger: BoundConnection | None) -> bool:
        if stranger is None:
            return False
        self.crowding.total.strangers_ended += 1
        stranger.end()
        return True

    def _look(self) -> None:
        now_s = self._loop.time()
        overdue = self._places.overdue(now_s - CROWDED_TIMEOUT_S)
        for stranger in islice(overdue, self._ended_a_look_max):
            self._end_stranger(stranger)
        told = self.crowding.look(now_s)
        if told:
            self._logger.warning("clients were turned away: %s; %r", told, self._places)
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def __repr__(self) -> str:
        return f"<ConnectionBound {self._places!r}>"


class BoundConnection(RequestHandler):
    """aiohttp's side of one connection that is counted, and whose requests' heads are bounded."""

    __slots__ = ("_bound", "_give_up", "_head_bytes", "_head_bytes_max")

    def __init__(
        self,
        server: web.Server,
        bound: ConnectionBound | None,
        give_up: Callable[[], None] | None,
        *,
        logger: logging.Logger,
        keepalive_timeout_s: float,
        line_bytes_max: int,
        field_bytes_max: int,
        head_bytes_max: int,
        read_buffer_bytes: int,
        lingering_s: float,
    ) -> None:
        """`give_up` ends what was accepted and has no transport yet. One of no bound is not
        counted.
        """
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=keepalive_timeout_s,
            logger=logger,
            access_log=None,  # type: ignore[arg-type]  # aiohttp tests for it
            max_line_size=line_bytes_max,
            max_field_size=field_bytes_max,
            lingering_time=lingering_s,
            read_bufsize=read_buffer_bytes,
            auto_decompress=False,  # an object's bytes are what was sent
        )
        self._bound = bound
        self._give_up = give_up
        self._head_bytes = 0  # of a head that has not come to its end
        self._head_bytes_max = head_bytes_max
        if bound is not None:
            bound.arrived(self)

    def end(self) -> None:
        """End the connection at once, whatever it does."""
        if self.transport is not None:
            cut(self.transport)
        elif self._give_up is not None:
            self._give_up()

    def request_begins(self, tenant: str) -> bool:
        """Whether a request that `tenant` signed may be served here."""
        return self._bound is None or self._bound.request_begins(self, tenant)

    def request_ends(self, *, stays_known: bool) -> None:
        """The request has ended; its tenant keeps the connection where it stays known."""
        if self._bound is not None:
            self._bound.request_ends(self, stays_known=stays_known)

    def never_made(self) -> None:
        """It was accepted and ended before it was a connection, in its TLS handshake for one."""
        if self._bound is not None:
            self._bound.lost(self)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and end a connection whose head has no end."""
        super().data_received(data)
        waiter = self._waiter  # for the end of a head
        if waiter is None or waiter.done():
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > self._head_bytes_max and self.transport is not None:
            self.unreadable("a head over its limit")
            self.transport.write(TOO_LARGE)
            self.force_close()

    def set_parser(
        self, parser: WebSocketReader, data_received_cb: Callable[[], None] | None = None
    ) -> None:
        """Have a WebSocket end with the first frame that its client did not mask."""
        super().set_parser(cast(WebSocketReader, MaskedFrames(parser)), data_received_cb)

    def unreadable(self, what: str) -> None:
        """What came is no request: for the log, without a byte of it."""
        self.logger.info("unreadable request: %s", what)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Count it out."""
        if self._bound is not None:
            self._bound.lost(self)
        super().connection_lost(exc)
