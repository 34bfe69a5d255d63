"""Frames of the stream connections: a 4-byte big-endian length, then that many bytes.

A frame holds one msgpack message; between messages a put sends its data as frames of raw bytes,
ended by an empty one. Sans I/O: the callers own the sockets.
"""

from __future__ import annotations

import struct

import msgspec

LENGTH = struct.Struct(">I")
MESSAGE_BYTES_MAX = 64 << 20  # a listing or a descriptor; larger things travel as data
DATA_FRAME_BYTES_MAX = 4 << 20

_ENCODER = msgspec.msgpack.Encoder()


def encode_frame(message: msgspec.Struct) -> bytes:
    """One message, ready to send."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


class FrameError(Exception):
    """The peer sent something that is no frame of this protocol; the connection is useless."""


def frame_length(header: bytes | bytearray | memoryview, bytes_max: int) -> int:
    """Length of the frame that a 4-byte header announces; raises `FrameError` over the limit."""
    (length,) = LENGTH.unpack(header)
    if length > bytes_max:
        raise FrameError(f"frame of {length} bytes, at most {bytes_max} are allowed")
    return int(length)
