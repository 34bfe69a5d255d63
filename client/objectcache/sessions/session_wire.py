"""How a session's messages travel: over the storage server's socket on this host, or a gateway."""

from __future__ import annotations

import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress

from objectcache_schemas.messages.frames import LENGTH, FrameError, encode_frame, frame_length
from objectcache_schemas.messages.message import Message

EVENT_BYTES_MAX = 1 << 20
_RECEIVE_BYTES = 64 << 10


class SessionWire(ABC):
    """A connection that carries a session. Whatever breaks it is raised as `OSError`."""

    name: str  # for messages to the user

    @abstractmethod
    def send(self, message: Message, fd: int | None = None) -> None:
        """Send a message, with a file descriptor beside it where there is one. By one thread at a
        time.
        """

    @abstractmethod
    def send_now(self, message: Message) -> None:
        """Send a small message without waiting. Where there is no room nothing of it is sent, and
        `OSError` is raised. By one thread at a time, which may be inside an engine's step.
        """

    @abstractmethod
    def receive(self) -> Iterator[bytes]:
        """Messages as they come, until the peer ends. Raises `FrameError` for what is none."""

    def leave(self) -> None:  # noqa: B027 - not all have a word for it
        """Tell the peer that the session ends as it should, and wait shortly for it to have heard.
        From any thread; `shut_down` follows.
        """

    @abstractmethod
    def shut_down(self) -> None:
        """Have whoever receives or sends see the end; from any thread, more than once."""

    @abstractmethod
    def close(self) -> None:
        """Let the connection go; nobody sends or receives any more."""


class FrameParser:
    """Cuts a stream into frames. Sans I/O; raises `FrameError` for one that is too long."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add what arrived; yields the frames that are now whole."""
        self._buffer += data
        while len(self._buffer) >= LENGTH.size:
            header = bytes(self._buffer[: LENGTH.size])
            end = LENGTH.size + frame_length(header, self._bytes_max)
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[LENGTH.size : end])
            del self._buffer[:end]
            yield frame


class SocketWire(SessionWire):
    """A connected unix socket, which the wire owns."""

    name = "the target socket"

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        """`timeout_s` bounds every wait to send."""
        sock.settimeout(None)  # the reading thread waits as long as it takes
        seconds = struct.pack("@ll", max(1, int(timeout_s)), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._socket = sock

    def send(self, message: Message, fd: int | None = None) -> None:
        data = encode_frame(message)
        if fd is None:
            sent = self._socket.send(data)
        else:
            sent = socket.send_fds(self._socket, [data], [fd])
        if sent < len(data):
            self._socket.sendall(data[sent:])

    def send_now(self, message: Message) -> None:
        # So small a message is taken whole or not at all.
        self._socket.send(encode_frame(message), socket.MSG_DONTWAIT)

    def receive(self) -> Iterator[bytes]:
        parser = FrameParser(EVENT_BYTES_MAX)
        while data := self._socket.recv(_RECEIVE_BYTES):
            yield from parser.feed(data)

    def receive_one(self) -> bytes:
        """The first message. Raises `ConnectionError` where the peer closes instead."""
        header = self._exactly(LENGTH.size)
        return self._exactly(frame_length(header, EVENT_BYTES_MAX))

    def _exactly(self, length_bytes: int) -> bytes:
        data = b""
        while len(data) < length_bytes:
            piece = self._socket.recv(length_bytes - len(data))
            if not piece:
                raise ConnectionError("it was closed")
            data += piece
        return data

    def shut_down(self) -> None:
        with suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


__all__ = ["EVENT_BYTES_MAX", "FrameError", "FrameParser", "SessionWire", "SocketWire"]
