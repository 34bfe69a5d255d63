"""Connections to the storage server, one request at a time on each.

Bodies are received into the caller's memory, and a client's socket can be passed beside a message.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

from objectcache_gateway.storage.storage_address import StorageAddress
from objectcache_runtime.networking.stream_socket import ConnectionEnded, Piece, StreamSocket
from objectcache_schemas.accounts import AccessKey, AdminToken, User
from objectcache_schemas.conversations import StorageReply
from objectcache_schemas.errors import (
    Busy,
    ObjectCacheError,
    Unavailable,
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
from objectcache_schemas.messages.later_fields import AnswerDecoder
from objectcache_schemas.messages.message import PROTOCOL_VERSION, Message
from objectcache_schemas.messages.reads import SendBody

R = TypeVar("R", bound=Message)

CONNECT_TIMEOUT_S = 5.0

REPLY: AnswerDecoder[StorageReply] = AnswerDecoder(
    StorageReply, strict=(User, AccessKey, AdminToken)
)

logger = logging.getLogger("objectcache.gateway.storage_connection")


class ConnectionLost(Unavailable):
    """The storage server went away. `unheard`: before a byte of a reply to the last message."""

    def __init__(self, message: str, *, unheard: bool) -> None:
        super().__init__(message)
        self.unheard = unheard


class _Silence(Exception):
    """The server has said nothing for as long as it may."""


class NotConnected(Unavailable):
    """There is no connection, so that nothing of a request was sent."""


class Unreachable(NotConnected):
    """Nobody takes connections where the storage server should be: it is being started again."""


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
            return await self._stream.receive_frame(REPLY)
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

    def cut(self) -> None:
        """Have whoever waits on it see its end: the server has stood still for too long."""
        self._stream.shut_down()

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
        return NotConnected(f"TLS to the storage server failed: {reason}", retry_after_s=1.0)
    if isinstance(error, OSError | TimeoutError | ConnectionLost):
        return Unreachable("the storage server cannot be reached", retry_after_s=1.0)
    if isinstance(error, ObjectCacheError) and not isinstance(error, Busy):
        return NotConnected(f"the storage server: {error.message}", retry_after_s=1.0)
    return None
