"""Connections to the storage server, one request at a time on each.

Bodies are received into the caller's memory, and a client's socket can be passed beside a message.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from objectcache_gateway.storage.storage_address import StorageAddress, UnixAddress
from objectcache_runtime.networking.stream_socket import ConnectionEnded, Piece, StreamSocket
from objectcache_runtime.shares.fair_shares import FairShares
from objectcache_schemas.conversations import StorageReply
from objectcache_schemas.errors import (
    Busy,
    ObjectCacheError,
    Unavailable,
    Unsupported,
    WireError,
)
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.frames import (
    DATA_FRAME_BYTES_MAX,
    LENGTH,
    MESSAGE_BYTES_MAX,
    FrameError,
    encode_frame,
)
from objectcache_schemas.messages.handshake import Hello, Welcome
from objectcache_schemas.messages.message import PROTOCOL_VERSION, Message, is_repeatable
from objectcache_schemas.messages.reads import SendBody

R = TypeVar("R", bound=Message)

CONNECT_TIMEOUT_S = 5.0
RECONNECT_WAIT_S = 5.0  # above what a restart takes, below what clients wait for an answer
RECONNECT_PAUSE_S = 0.05
GATEWAY = "(gateway)"  # whoever asks for no tenant; no user is called so

_waits_for_restart: ContextVar[bool] = ContextVar("waits_for_restart", default=True)

_REPLY: msgspec.msgpack.Decoder[StorageReply] = msgspec.msgpack.Decoder(StorageReply)

logger = logging.getLogger("objectcache.gateway.storage_connection")


class ConnectionLost(Unavailable):
    """The storage server went away. `unheard`: before a byte of a reply to the last message."""

    def __init__(self, message: str, *, unheard: bool) -> None:
        super().__init__(message)
        self.unheard = unheard


class _Silence(Exception):
    """The server has said nothing for as long as it may."""


class Unreachable(Unavailable):
    """Nobody takes connections where the storage server should be: it is being started again."""


@contextmanager
def without_waiting() -> Generator[None]:
    """What the block asks of a storage server that nobody can connect to fails at once."""
    before = _waits_for_restart.set(False)
    try:
        yield
    finally:
        _waits_for_restart.reset(before)


class StorageConnection:
    """One connection, after its handshake.

    `idle` is true between conversations. Cancelling a call leaves the connection useless: whoever
    owns it closes it, which is how the storage server learns of it. Every method raises
    `ConnectionLost` when the storage server goes away, and `Unavailable` when it stays silent for
    longer than `timeout_s`.
    """

    def __init__(
        self, connected: socket.socket, timeout_s: float, *, passes_descriptors: bool = True
    ) -> None:
        self.passes_descriptors = passes_descriptors  # beside a message, to this host's server
        self._stream = StreamSocket(connected, passes_descriptors=passes_descriptors)
        self._stream.reads_ahead = self._stream.waits_first = True
        self._stream.takes_descriptors = False
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self.idle = True

    @classmethod
    async def open(
        cls, address: StorageAddress, limits: Limits, timeout_s: float
    ) -> StorageConnection:
        """Connect and agree on the limits. Raises `Busy` where this process has no descriptor left,
        `Unreachable` where nobody answers, `Unavailable` with the server's own reason where it
        refused.
        """
        connection: StorageConnection | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connected = await address.connect()
                passes = address.passes_descriptors
                connection = cls(connected, timeout_s, passes_descriptors=passes)
                hello = Hello(v=PROTOCOL_VERSION, limits_fingerprint=limits.fingerprint())
                await connection.ask(hello, Welcome)
        except BaseException as error:
            if connection is not None:
                connection.close()
            failure = _connecting_failed(error)
            if failure is None:
                raise
            raise failure from error
        return connection

    # --- messages ---

    async def ask(
        self,
        message: Message,
        reply_type: type[R],
        *,
        descriptor: int | None = None,
        timeout_s: float | None = None,
    ) -> R:
        """Send a message, with a file descriptor beside it if given, and return the reply.

        `timeout_s` replaces how long a message may stay unanswered.
        """
        await self.send(message, descriptor=descriptor)
        return await self.receive(reply_type, timeout_s=timeout_s)

    async def ask_for_descriptor(
        self, message: Message, reply_type: type[R]
    ) -> tuple[R, int | None]:
        """Send a message and return the reply, with the file descriptor beside it if one came. The
        caller closes it.
        """
        self._stream.takes_descriptors = True
        try:
            return await self.ask(message, reply_type), self._stream.take_descriptor()
        finally:
            self._stream.takes_descriptors = False
            self._stream.close_descriptors()  # beside an error

    async def send(self, message: Message, *, descriptor: int | None = None) -> None:
        """Send a message."""
        self.idle = False
        if descriptor is None:
            await self._send_all([encode_frame(message)])
            return
        try:
            await self._stream.send_frame_with(message, descriptor)
        except (ConnectionEnded, OSError) as error:
            raise self._lost(unheard=True) from error

    async def receive(self, reply_type: type[R], *, timeout_s: float | None = None) -> R:
        """The reply; raises the error that the storage server answered with."""
        # Every request waits here twice, and asyncio.timeout costs several times a timer.
        silent_s = timeout_s or self._timeout_s
        timer = self._loop.call_later(silent_s, self._stream.expire, _Silence())
        try:
            reply = await self._receive_reply()
        except _Silence as error:
            raise Unavailable("the storage server does not answer") from error
        finally:
            timer.cancel()
            self._stream.expire(None)
        if isinstance(reply, WireError):
            self.idle = True
            raise ObjectCacheError.from_wire(reply)
        self.idle = not reply.goes_on()
        if not isinstance(reply, reply_type):
            self.idle = False
            raise ObjectCacheError(
                f"the storage server answered {type(reply).__name__}, not {reply_type.__name__}"
            )
        return reply

    # --- data of a put ---

    async def send_data(self, pieces: Sequence[Piece]) -> None:
        """Send bytes of a put. Raises the storage server's own error where it sent one."""
        frame: list[Piece] = []
        room_bytes = DATA_FRAME_BYTES_MAX
        for piece in pieces:
            for start in range(0, len(piece), DATA_FRAME_BYTES_MAX):
                part = memoryview(piece)[start : start + DATA_FRAME_BYTES_MAX]
                if len(part) > room_bytes:
                    await self._send_frame(frame)
                    frame, room_bytes = [], DATA_FRAME_BYTES_MAX
                frame.append(part)
                room_bytes -= len(part)
        if frame:
            await self._send_frame(frame)

    async def end_data(self) -> None:
        """Say that the data of a put is complete."""
        await self._send_frame([])

    async def send_frame(self, body: bytes) -> None:
        """Pass on a message as it came."""
        await self._send_frame([body])

    async def receive_frame(self) -> bytes:
        """A message as it comes, however long that takes."""
        try:
            frame = bytearray(await self._stream.receive_length(MESSAGE_BYTES_MAX))
            await self._stream.receive_into(memoryview(frame))
        except FrameError as error:
            raise ObjectCacheError(f"the storage server sent no message: {error}") from error
        except (ConnectionEnded, OSError) as error:
            raise self._lost(unheard=False) from error
        return bytes(frame)

    async def _send_frame(self, pieces: list[Piece]) -> None:
        length_bytes = sum(map(len, pieces))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_all([LENGTH.pack(length_bytes), *pieces])
        except TimeoutError as error:
            raise Unavailable("the storage server takes no data") from error
        except ConnectionLost:
            await self._raise_parting_error()
            raise

    async def _raise_parting_error(self) -> None:
        """A server that closes in the middle of a put has said why before."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._receive_reply()
        except (ConnectionLost, TimeoutError):
            return
        if isinstance(reply, WireError):
            raise ObjectCacheError.from_wire(reply)

    # --- a body ---

    async def ask_for_body(self, offset_bytes: int, length_bytes: int) -> None:
        """Have the body sent on this connection; `receive_body` then takes all of it."""
        await self.send(
            SendBody(offset_bytes=offset_bytes, length_bytes=length_bytes, into_socket=False)
        )

    async def receive_body(
        self, length_bytes: int, buffer: memoryview
    ) -> AsyncGenerator[memoryview, None]:
        """The raw bytes of a body, each piece in `buffer` and valid until the next is asked for."""
        left_bytes = length_bytes
        while left_bytes:
            count = await self._receive_some(buffer[:left_bytes])
            left_bytes -= count
            self.idle = left_bytes == 0
            yield buffer[:count]

    async def _receive_some(self, buffer: memoryview) -> int:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._stream.receive_some(buffer)
        except TimeoutError as error:
            raise Unavailable("the storage server sends no more") from error
        except (ConnectionEnded, OSError) as error:
            raise self._lost(unheard=False) from error

    # --- the socket ---

    async def _receive_reply(self) -> StorageReply:
        before_bytes = self._stream.received_bytes
        try:
            return await self._stream.receive_frame(_REPLY)
        except FrameError as error:
            raise ObjectCacheError(f"the storage server sent no message: {error}") from error
        except (ConnectionEnded, OSError) as error:
            raise self._lost(unheard=self._stream.received_bytes == before_bytes) from error

    async def _send_all(self, pieces: list[Piece]) -> None:
        try:
            await self._stream.send_pieces(pieces)
        except (ConnectionEnded, OSError) as error:
            raise self._lost(unheard=True) from error

    def is_stale(self) -> bool:
        """Whether an idle connection has ended or holds something that nobody asked for."""
        return not self._stream.is_quiet()

    def _lost(self, *, unheard: bool) -> ConnectionLost:
        self.idle = False
        return ConnectionLost("the storage server closed the connection", unheard=unheard)

    def close(self) -> None:
        """Close; whatever the storage server still does for the conversation, it cancels."""
        self.idle = False
        self._stream.close()

    def __repr__(self) -> str:
        return f"<StorageConnection {self._stream} {'idle' if self.idle else 'busy'}>"


def _connecting_failed(error: BaseException) -> Unavailable | None:
    """What an error on the way to an agreed connection means; None where it speaks for itself."""
    if isinstance(error, ssl.SSLError):
        reason = error.reason or "the handshake failed"
        return Unavailable(f"TLS to the storage server failed: {reason}", retry_after_s=1.0)
    if isinstance(error, OSError | TimeoutError | ConnectionLost):
        return Unreachable("the storage server cannot be reached", retry_after_s=1.0)
    if isinstance(error, ObjectCacheError) and not isinstance(error, Busy):
        return Unavailable(f"the storage server: {error.message}", retry_after_s=1.0)
    return None


class StorageConversation:
    """The use of one connection for one request; its first message may need another connection.

    Entering it counts the connection; leaving gives an idle one back and closes any other.
    """

    def __init__(self, pool: StoragePool, tenant: str = GATEWAY) -> None:
        self._pool = pool
        self._tenant = tenant
        self._connection: StorageConnection | None = None

    async def __aenter__(self) -> Self:
        self._pool.count_use(self._tenant)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.uncount_use(self._tenant)
        self.end()

    @property
    def connection(self) -> StorageConnection:
        """The connection, once the first message was sent."""
        assert self._connection is not None
        return self._connection

    async def begin(
        self, request: Message, reply_type: type[R], *, timeout_s: float | None = None
    ) -> R:
        """Send the first message and return the reply; `timeout_s` as in `StorageConnection.ask`.

        A pooled connection that ended before a byte of the reply is replaced once, if the request
        may be carried out twice: most likely the storage server was restarted and did not see it,
        but it may have died after it did. Raises `ConnectionLost` where it may not.
        """
        pooled = self._pool.take_idle()
        if pooled is not None:
            self._connection = pooled
            try:
                return await pooled.ask(request, reply_type, timeout_s=timeout_s)
            except ConnectionLost as error:
                if not error.unheard or not self._pool.may_repeat(request):
                    raise
                pooled.close()
        self._connection = await self._pool.connect()
        return await self._connection.ask(request, reply_type, timeout_s=timeout_s)

    async def begin_with_descriptor(
        self, request: Message, reply_type: type[R]
    ) -> tuple[R, int | None]:
        """Send a first message that must not be repeated; see `ask_for_descriptor`."""
        self._connection = self._pool.take_idle() or await self._pool.connect()
        if not self._connection.passes_descriptors:
            raise Unsupported(
                "the path through the gateway's memory needs a storage server on the gateway's host"
            )
        return await self._connection.ask_for_descriptor(request, reply_type)

    def end(self) -> None:
        """Give an idle connection back, close any other."""
        if self._connection is None:
            return
        if self._connection.idle:
            self._pool.give_back(self._connection)
        else:
            self._connection.close()


class StoragePool:
    """At most `connections_max` connections to one storage server; the last used is used next.

    While the server cannot be reached requests wait for it, until RECONNECT_WAIT_S after the first
    failure: it is being started again more often than not. After that they fail at once, and
    `without_waiting` they always do.
    """

    def __init__(
        self, address: Path | StorageAddress, limits: Limits, connections_max: int, timeout_s: float
    ) -> None:
        self._address = UnixAddress(address) if isinstance(address, Path) else address
        self._unreachable_since_s: float | None = None
        self._limits = limits
        self._uses = FairShares(connections_max)
        self._timeout_s = timeout_s
        self._idle: list[StorageConnection] = []
        self._closed = False

    def conversation(self) -> StorageConversation:
        """A connection for one request. Entering raises `Busy` where all are in use."""
        return StorageConversation(self)

    def count_use(self, tenant: str = GATEWAY) -> None:
        """Count a connection as in use. Raises `Busy` where all are, or the tenant has its share;
        the gateway itself has what is free.
        """
        uses = self._uses
        if uses.free <= 0 or (tenant != GATEWAY and not uses.may_take(tenant, 1)):
            raise Busy(
                f"{uses.taken} connections to the storage server are in use, {uses.held(tenant)} "
                f"of them for this user; gateway.storage_connections_max is {uses.total}",
                retry_after_s=1.0,
            )
        uses.take(tenant, 1)

    def uncount_use(self, tenant: str = GATEWAY) -> None:
        """Count it no more."""
        self._uses.give_back(tenant, 1)

    async def call(
        self, request: Message, reply_type: type[R], *, timeout_s: float | None = None
    ) -> R:
        """A conversation of one request and one reply; `timeout_s` as in `ask`."""
        async with self.conversation() as conversation:
            return await conversation.begin(request, reply_type, timeout_s=timeout_s)

    @property
    def in_use(self) -> int:
        """Requests that have, or are getting, a connection."""
        return self._uses.taken

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return len(self._idle)

    def take_idle(self) -> StorageConnection | None:
        """A live idle connection, or None."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_stale():
                return connection
            connection.close()
        return None

    def may_repeat(self, request: Message) -> bool:
        """Whether a request whose reply was lost may be sent again."""
        return is_repeatable(request, self._limits)

    async def connect(self) -> StorageConnection:
        """A connection of its own; raises `Unavailable` or `Busy`."""
        while True:
            try:
                opened = await StorageConnection.open(self._address, self._limits, self._timeout_s)
            except Unreachable:
                if self._closed or not self._is_worth_waiting():
                    raise
                await asyncio.sleep(RECONNECT_PAUSE_S)
            else:
                self._unreachable_since_s = None
                return opened

    def _is_worth_waiting(self) -> bool:
        """Whether to try again, after nobody took a connection."""
        now_s = asyncio.get_running_loop().time()
        if self._unreachable_since_s is None:
            self._unreachable_since_s = now_s
        away_s = now_s - self._unreachable_since_s
        return _waits_for_restart.get() and away_s < RECONNECT_WAIT_S

    def give_back(self, connection: StorageConnection) -> None:
        """Keep an idle connection for the next request."""
        if self._closed:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        """Close what is idle; what is in use closes when its request ends."""
        self._closed = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def __repr__(self) -> str:
        return f"<StoragePool {self.in_use}/{self._uses.total} in use, {len(self._idle)} idle>"
