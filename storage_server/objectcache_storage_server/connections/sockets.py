"""A connected stream socket in the event loop, with frames and passed file descriptors.

asyncio's own streams copy every byte twice and cannot pass descriptors; here bytes go from and to
the caller's memory.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from objectcache_schemas.frames import (
    DATA_FRAME_BYTES_MAX,
    LENGTH,
    MESSAGE_BYTES_MAX,
    FrameError,
    encode_frame,
    frame_length,
)

T = TypeVar("T")

_ANCILLARY_BYTES = socket.CMSG_SPACE(array.array("i").itemsize)


class ConnectionEnded(Exception):
    """The peer closed the connection between or within frames."""


class StreamSocket:
    """Owns a connected socket. One task receives and one sends at a time."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._descriptors: list[int] = []

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
        await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def writable(self) -> None:
        """Wait until bytes can be sent."""
        await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises `ConnectionEnded` if the peer closes before."""
        while view:
            try:
                count, ancillary, _, _ = self._socket.recvmsg_into([view], _ANCILLARY_BYTES)
            except BlockingIOError:
                await self.readable()
                continue
            except ConnectionError as error:
                raise ConnectionEnded from error
            self._keep_descriptors(ancillary)
            if count == 0:
                raise ConnectionEnded
            view = view[count:]

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        while len(self._descriptors) > 1:  # one request passes at most one
            os.close(self._descriptors.pop(0))

    def take_descriptor(self) -> int | None:
        """The file descriptor that came with the last frame; the caller owns it."""
        return self._descriptors.pop() if self._descriptors else None

    async def receive_frame(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """One message. Raises `ConnectionEnded`, or `FrameError` if it is none."""
        data = bytearray(await self.receive_length(MESSAGE_BYTES_MAX))
        await self.receive_into(memoryview(data))
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError(str(error)) from error

    async def receive_length(self, bytes_max: int = DATA_FRAME_BYTES_MAX) -> int:
        """The length of the next frame, which the caller then receives."""
        header = bytearray(LENGTH.size)
        await self.receive_into(memoryview(header))
        return frame_length(header, bytes_max)

    async def send_frame(self, message: msgspec.Struct) -> None:
        """Send one message."""
        await self.send_all(memoryview(encode_frame(message)))

    async def send_frame_with(self, message: msgspec.Struct, descriptor: int) -> None:
        """Send one message, with a file descriptor beside it; the caller keeps the descriptor."""
        frame = memoryview(encode_frame(message))
        while True:
            try:
                sent_bytes = socket.send_fds(self._socket, [frame], [descriptor])
                break
            except BlockingIOError:
                await self.writable()
        await self.send_all(frame[sent_bytes:])

    async def send_all(self, view: memoryview) -> None:
        """Send all of `view`. Raises `OSError`."""
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                await self.writable()

    def send_now(self, data: bytes) -> int:
        """Send what fits without waiting; from any thread. Raises `OSError`."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    async def closed_by_peer(self) -> None:
        """Return when the peer has closed, or sent something out of turn."""
        while True:
            await self.readable()
            try:
                self._socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            except OSError:
                return
            return

    def close(self) -> None:
        """Close the socket and any descriptor that nobody took."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._socket.close()

    def __repr__(self) -> str:
        return f"<StreamSocket {self._socket.fileno()}>"


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
