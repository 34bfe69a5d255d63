"""A connected stream socket in the event loop, with frames and passed file descriptors.

asyncio's own streams copy every byte twice and cannot pass descriptors; here bytes go from and to
the caller's memory.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import select
import socket
import struct
import termios
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from objectcache_schemas.errors import ObjectCacheError, Unsupported
from objectcache_schemas.messages.frames import (
    DATA_FRAME_BYTES_MAX,
    LENGTH,
    MESSAGE_BYTES_MAX,
    FrameError,
    encode_frame,
    frame_length,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Piece = bytes | bytearray | memoryview

RECEIVE_BYTES = 16 << 10  # above nearly all messages; what is larger is hardly copied twice
PIECES_MAX = 512  # of one call to sendmsg; the system's own limit is 1,024


class FrameDecoder(Protocol[T_co]):
    """Makes a message of a frame; raises `msgspec.MsgspecError` where it is none."""

    def decode(self, buf: bytes | bytearray | memoryview, /) -> T_co:
        """The message."""
        ...


_INT = struct.Struct("@i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)


class ConnectionEnded(Exception):
    """The peer closed the connection between or within frames."""


class StreamSocket:
    """Owns a connected socket. One task receives and one sends at a time.

    With `reads_ahead` what arrives is taken in pieces of up to RECEIVE_BYTES, so that a small frame
    costs one call of the system; larger ones go straight to the caller's memory. It is for peers
    that wait for an answer after every descriptor: of several frames that were taken together,
    nobody could tell whose a descriptor is. With `waits_first` nothing is looked for before the
    loop says that it came: an answer is seldom there when it is first asked for. The loop watches
    the socket from one wait to the next, which spares two calls a request. Without
    `takes_descriptors` the system closes what a peer passes, and receiving costs less.
    """

    reads_ahead = False
    waits_first = False

    def __init__(self, connected: socket.socket, *, passes_descriptors: bool = True) -> None:
        connected.setblocking(False)
        self._passes_descriptors = self.takes_descriptors = passes_descriptors
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._descriptors: list[int] = []
        self._received = memoryview(b"")  # what was taken and nobody has asked for yet
        self._reader: asyncio.Future[None] | None = None  # of whoever waits for something to read
        self.is_watched = False  # by the loop, for what arrives
        self.received_bytes = 0  # of all that came
        self._expired: Exception | None = None

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        future = self._loop.create_future()
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise ConnectionEnded
        add(descriptor, _resolve, future)
        try:
            await future
        finally:
            remove(descriptor)

    async def readable(self) -> None:
        """Wait until something arrived, or the peer has closed."""
        if self._expired is not None:
            raise self._expired
        descriptor = self._socket.fileno()
        if descriptor < 0:
            raise ConnectionEnded
        reader = self._reader = self._loop.create_future()
        if not self.is_watched:
            self._loop.add_reader(descriptor, self._on_readable)
            self.is_watched = True
        try:
            await reader
        finally:
            if self._reader is reader:
                self._reader = None

    def expire(self, error: Exception | None) -> None:
        """Have whoever waits for something to read get this error, and those who will; None ends
        that.
        """
        self._expired = error
        if error is not None and self._reader is not None and not self._reader.done():
            self._reader.set_exception(error)

    def _on_readable(self) -> None:
        if self._reader is None:
            self._unwatch()  # nobody takes it, and the loop would call again and again
        elif not self._reader.done():
            self._reader.set_result(None)

    def _unwatch(self) -> None:
        if self.is_watched:
            self.is_watched = False
            self._loop.remove_reader(self._socket.fileno())

    async def writable(self) -> None:
        """Wait until bytes can be sent."""
        await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises `ConnectionEnded` if the peer closes before."""
        while view:
            view = view[await self.receive_some(view) :]

    async def receive_some(self, view: memoryview) -> int:
        """Fill the beginning of `view` with what comes next; how many bytes. Raises
        `ConnectionEnded`.
        """
        if not self._received:
            if not self.reads_ahead or len(view) >= RECEIVE_BYTES:
                return await self._receive_straight(view)
            await self._take_piece()
        count = min(len(view), len(self._received))
        view[:count] = self._received[:count]
        self._received = self._received[count:]
        return count

    async def _take_piece(self) -> None:
        if self.waits_first:
            await self.readable()
        while True:
            try:
                if self.takes_descriptors:
                    data, ancillary, _, _ = self._socket.recvmsg(
                        RECEIVE_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                    )
                    self._keep_descriptors(ancillary)
                else:
                    data = self._socket.recv(RECEIVE_BYTES)
                break
            except BlockingIOError:
                await self.readable()
            except ConnectionError as error:
                raise ConnectionEnded from error
        if not data:
            raise ConnectionEnded
        self._received = memoryview(data)
        self.received_bytes += len(data)

    async def _receive_straight(self, view: memoryview) -> int:
        while True:
            try:
                if self.takes_descriptors:
                    count, ancillary, _, _ = self._socket.recvmsg_into(
                        [view], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                    )
                    self._keep_descriptors(ancillary)
                else:
                    count = self._socket.recv_into(view)
                break
            except BlockingIOError:
                await self.readable()
            except ConnectionError as error:
                raise ConnectionEnded from error
        if not count:
            raise ConnectionEnded
        self.received_bytes += count
        return count

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        while len(self._descriptors) > 1:  # one request passes at most one
            os.close(self._descriptors.pop(0))

    def take_descriptor(self) -> int | None:
        """The file descriptor that came with the last frame; the caller owns it. It is closed in
        programs that this one starts.
        """
        return self._descriptors.pop() if self._descriptors else None

    def close_descriptors(self) -> None:
        """Close what came and nobody took."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    async def receive_frame(
        self, decoder: FrameDecoder[T], bytes_max: int = MESSAGE_BYTES_MAX
    ) -> T:
        """One message. Raises `ConnectionEnded`, or `FrameError` if it is none."""
        if self.reads_ahead and not self._received:
            await self._take_piece()
        data: memoryview | bytearray | None = self._taken_frame(bytes_max)
        if data is None:
            data = bytearray(await self.receive_length(bytes_max))
            await self.receive_into(memoryview(data))
        try:
            return decoder.decode(data)
        except (
            msgspec.MsgspecError,
            UnicodeDecodeError,
            RecursionError,
            ObjectCacheError,  # a record in it that checks itself
        ) as error:
            raise FrameError(str(error)) from error

    def _taken_frame(self, bytes_max: int) -> memoryview | None:
        """The next frame where all of it was taken already, as nearly all are."""
        taken = self._received
        if len(taken) < LENGTH.size:
            return None
        end = LENGTH.size + frame_length(taken[: LENGTH.size], bytes_max)
        if len(taken) < end:
            return None
        self._received = taken[end:]
        return taken[LENGTH.size : end]

    async def receive_length(self, bytes_max: int = DATA_FRAME_BYTES_MAX) -> int:
        """The length of the next frame, which the caller then receives."""
        header = bytearray(LENGTH.size)
        await self.receive_into(memoryview(header))
        return frame_length(header, bytes_max)

    async def send_frame(self, message: msgspec.Struct) -> None:
        """Send one message."""
        await self.send_all(memoryview(encode_frame(message)))

    async def send_frame_with(self, message: msgspec.Struct, descriptor: int) -> None:
        """Send one message, with a file descriptor beside it; the caller keeps the descriptor.

        Raises `Unsupported` where the peer is on another host.
        """
        if not self._passes_descriptors:
            raise Unsupported(
                "a target's memory can be passed only to a gateway on the storage server's host; "
                "have the bytes delivered in the body"
            )
        frame = memoryview(encode_frame(message))
        while True:
            try:
                sent_bytes = socket.send_fds(self._socket, [frame], [descriptor])
                break
            except BlockingIOError:
                await self.writable()
        await self.send_all(frame[sent_bytes:])

    async def send_pieces(self, pieces: Sequence[Piece]) -> None:
        """Send all of them, in few calls of the system. Raises `OSError`."""
        for start in range(0, len(pieces), PIECES_MAX):
            some = pieces[start : start + PIECES_MAX]
            try:
                sent_bytes = self._socket.sendmsg(some)
            except BlockingIOError:
                sent_bytes = 0
            for piece in some:
                if sent_bytes < len(piece):
                    await self.send_all(memoryview(piece)[sent_bytes:])
                sent_bytes = max(0, sent_bytes - len(piece))

    async def send_all(self, view: memoryview, sent: Callable[[int], object] | None = None) -> None:
        """Send all of `view`; `sent` is told of each part that left. Raises `OSError`."""
        while view:
            try:
                count = self._socket.send(view)
            except BlockingIOError:
                await self.writable()
            else:
                view = view[count:]
                if sent is not None:
                    sent(count)

    def unsent_bytes(self) -> int:
        """What was given to the system and the peer has not taken: of TCP, not acknowledged."""
        try:
            answer = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(_INT.size))
        except (OSError, ValueError):  # closed
            return 0
        return int(_INT.unpack(answer)[0])

    def send_now(self, data: bytes) -> int:
        """Send what fits without waiting; from any thread. Raises `OSError`."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    async def closed_by_peer(self) -> None:
        """Return when the peer has closed, or sent something out of turn."""
        if not self._received:
            await self.readable()
            while self.is_quiet():
                await self.readable()

    def is_quiet(self) -> bool:
        """Whether the peer has neither closed nor sent what nobody has received."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._received
        except OSError:
            return False
        return False

    def has_hung_up(self) -> bool:
        """Whether the peer has closed, or this side, whatever of it is to be received still; from
        any thread.
        """
        descriptor = self._socket.fileno()
        if descriptor < 0:
            return True
        looking = select.poll()
        looking.register(descriptor, select.POLLRDHUP)
        return bool(looking.poll(0))

    def shut_down(self) -> None:
        """Have the peer, and whoever waits here, see the end."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and any descriptor that nobody took."""
        self.close_descriptors()
        self._unwatch()
        self._socket.close()

    def __repr__(self) -> str:
        return f"<StreamSocket {self._socket.fileno()}>"


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
