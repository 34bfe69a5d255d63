"""Refuses a client's WebSocket frames that are not masked, which aiohttp takes as they come.

RFC 6455, section 5.1: a server must close the connection upon an unmasked frame, with 1002.
"""

from __future__ import annotations

from typing import Protocol

MASKED = 0x80  # of a frame's second byte
HEAD_BYTES, KEY_BYTES = 2, 4
LENGTH_BYTES = {126: 2, 127: 8}  # behind the head, by the length that it names
# Its reserved bits are set, which the library refuses, as every breach of the protocol, with 1002.
REFUSED = b"\xf0\x80"


class WebSocketParser(Protocol):
    """aiohttp's reader of one connection's frames."""

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Parse what came; whether the connection is to end, and what was not taken."""
        ...

    def feed_eof(self) -> None:
        """No more comes."""
        ...


class MaskedFrames:
    """Passes the frames of a client on to `parser`, up to the first that is not masked."""

    def __init__(self, parser: WebSocketParser) -> None:
        self._parser = parser
        self._head = b""  # of a frame, as far as it has come
        self._left_bytes = 0  # of a frame whose head is known

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """As `WebSocketParser.feed_data`."""
        data = self._head + data
        self._head = b""
        position = self._left_bytes
        while len(data) - position >= HEAD_BYTES:
            second = data[position + 1]
            if not second & MASKED:
                self._left_bytes = 0
                return self._parser.feed_data(data[:position] + REFUSED)
            size = second & ~MASKED
            key = position + HEAD_BYTES + LENGTH_BYTES.get(size, 0)
            if key > len(data):
                break
            if size in LENGTH_BYTES:
                size = int.from_bytes(data[position + HEAD_BYTES : key])
            position = key + KEY_BYTES + size
        if position < len(data):
            data, self._head = data[:position], data[position:]
        self._left_bytes = position - len(data)
        return self._parser.feed_data(data)

    def feed_eof(self) -> None:
        """As `WebSocketParser.feed_eof`."""
        self._parser.feed_eof()
