"""A drive that forgets what was not flushed when the power goes: an NBD server for QEMU.

https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md, fixed newstyle, one client.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from pathlib import Path
from typing import BinaryIO, Self, cast

from tests.crash.lossy_files import CutStyle, LossyFile

_GREETING = b"NBDMAGICIHAVEOPT" + struct.pack(">H", 1)
_OPTION = struct.Struct(">8sII")  # magic, which, bytes that follow
_OPTION_REPLY = struct.Struct(">QIII")  # magic, which, kind, bytes that follow
_REQUEST = struct.Struct(">IHHQQI")  # magic, flags, type, handle, offset, length
_REPLY = struct.Struct(">IIQ")  # magic, error, handle
_OPTION_REPLY_MAGIC, _REPLY_MAGIC = 0x3E889045565A9, 0x67446698
_INFO, _GO = 6, 7
_READ, _WRITE, _DISCONNECT, _FLUSH = 0, 1, 2, 3
_FORCE_UNIT_ACCESS = 1
_FLAGS = 1 | 4 | 8  # they are there; flush; a write may ask to be flushed
_INVALID = 22


class LossyDrive:
    """Serves `capacity_bytes` on a socket until it is left."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self.flushes = 0
        self._capacity_bytes = capacity_bytes
        self._file = LossyFile()
        self._file.resize(capacity_bytes)
        self._file.flush()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, name="lossy drive")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def cut(self, rng: random.Random) -> bytes:
        """What is there after the power was gone. The client has to be gone as well."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._file.cut(rng, CutStyle.chosen(rng))
        return bytes(self._file.content)

    def _serve(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # nobody came
            return
        with client, cast(BinaryIO, client.makefile("rwb")) as stream:
            try:
                self._shake_hands(stream)
                while self._answer(stream):
                    pass
            except (EOFError, OSError):
                return  # the power is gone

    def _shake_hands(self, stream: BinaryIO) -> None:
        send(stream, _GREETING)
        receive(stream, 4)
        while True:
            _, option, length = _OPTION.unpack(receive(stream, _OPTION.size))
            receive(stream, length)
            if option not in (_INFO, _GO):
                unsupported = 1 << 31 | 1
                send(stream, _OPTION_REPLY.pack(_OPTION_REPLY_MAGIC, option, unsupported, 0))
                continue
            export = struct.pack(">HQH", 0, self._capacity_bytes, _FLAGS)
            head = _OPTION_REPLY.pack(_OPTION_REPLY_MAGIC, option, 3, len(export))
            send(stream, head + export + _OPTION_REPLY.pack(_OPTION_REPLY_MAGIC, option, 1, 0))
            if option == _GO:
                return

    def _answer(self, stream: BinaryIO) -> bool:
        _, flags, kind, handle, offset, length = _REQUEST.unpack(receive(stream, _REQUEST.size))
        data, error = b"", 0
        if kind == _READ:
            data = self._file.read(offset, length)
        elif kind == _WRITE:
            self._file.write(offset, receive(stream, length))
        elif kind == _DISCONNECT:
            return False
        elif kind != _FLUSH:
            error = _INVALID
        if kind == _FLUSH or flags & _FORCE_UNIT_ACCESS:
            self.flushes += 1
            self._file.flush()
        send(stream, _REPLY.pack(_REPLY_MAGIC, error, handle) + data)
        return True


def receive(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


def send(stream: BinaryIO, data: bytes) -> None:
    stream.write(data)
    stream.flush()
