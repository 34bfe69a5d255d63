"""A blocking gateway, as far as tests need one: speaks to a storage server's sockets directly."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from objectcache_schemas.conversations import StorageReply
from objectcache_schemas.errors import ObjectCacheError, WireError
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.buckets import CreateBucket
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.handshake import Done, Hello, Welcome
from objectcache_schemas.messages.kv import KvPut, KvStored
from objectcache_schemas.messages.message import PROTOCOL_VERSION
from objectcache_schemas.messages.sessions import (
    CreateSession,
    JoinSession,
    RegisterTarget,
    SessionTicket,
    TargetEvent,
    TargetRegistered,
)
from objectcache_schemas.messages.writes import CommitPut, PutObject, SendData, Stored

T = TypeVar("T")

_REPLY = msgspec.msgpack.Decoder(StorageReply)
_EVENT = msgspec.msgpack.Decoder(TargetEvent)
TIMEOUT_S = 60.0  # generous, because machines may be busy


class FrameClient:
    """Frames over a blocking unix socket."""

    def __init__(self, path: Path | str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(str(path))

    def send(self, message: msgspec.Struct, descriptor: int | None = None) -> None:
        frame = encode_frame(message)
        if descriptor is None:
            self.socket.sendall(frame)
        else:
            socket.send_fds(self.socket, [frame], [descriptor])

    def receive_bytes(self, length_bytes: int) -> bytes:
        """Exactly so many bytes; raises `EOFError` where the peer closed before."""
        data = bytearray()
        while len(data) < length_bytes:
            piece = self.socket.recv(min(1 << 20, length_bytes - len(data)))
            if not piece:
                raise EOFError(f"{len(data)} of {length_bytes} bytes")
            data += piece
        return bytes(data)

    def receive(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        (length_bytes,) = LENGTH.unpack(self.receive_bytes(LENGTH.size))
        return decoder.decode(self.receive_bytes(length_bytes))

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StorageClient(FrameClient):
    """One connection to a storage server, after the handshake."""

    def __init__(self, path: Path | str, limits: Limits = Limits()) -> None:  # noqa: B008
        super().__init__(path)
        hello = Hello(v=PROTOCOL_VERSION, limits_fingerprint=limits.fingerprint())
        try:
            self.ask(hello, Welcome)
        except ObjectCacheError:
            self.close()
            raise

    def reply(self, kind: type[T]) -> T:
        """The next message, of this kind; raises the error that came instead."""
        message = self.receive(_REPLY)
        if isinstance(message, WireError):
            raise ObjectCacheError.from_wire(message)
        assert isinstance(message, kind), message
        return message

    def ask(self, message: msgspec.Struct, kind: type[T], descriptor: int | None = None) -> T:
        self.send(message, descriptor)
        return self.reply(kind)

    def send_data(self, pieces: Iterable[bytes]) -> None:
        """Data frames, then the empty one."""
        for piece in pieces:
            self.send_piece(piece)
        self.socket.sendall(LENGTH.pack(0))

    def send_piece(self, piece: bytes) -> None:
        """One data frame."""
        self.socket.sendall(LENGTH.pack(len(piece)) + piece)

    def create_bucket(self, name: str) -> None:
        self.ask(CreateBucket(name=name, owner="root", region="us-east-1"), Done)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """Store one object."""
        self.ask(PutObject(bucket=bucket, key=key, size_bytes=len(data)), SendData)
        self.send_data([data[start : start + (1 << 20)] for start in range(0, len(data), 1 << 20)])
        self.ask(CommitPut(etag="etag"), Stored)

    def kv_put(self, bucket: str, descriptor: bytes, payload: bytes) -> tuple[int, int]:
        """Store chunks; returns how many are new and how many existed."""
        self.ask(KvPut(bucket=bucket, identity="root", descriptor=descriptor), SendData)
        step = 1 << 20
        self.send_data([payload[start : start + step] for start in range(0, len(payload), step)])
        stored = self.ask(CommitPut(), KvStored)
        return stored.stored, stored.existing


class EventClient(FrameClient):
    """A connection to the target socket."""

    def event(self) -> TargetEvent:
        """The next event; raises the error that came instead."""
        message: TargetEvent = self.receive(_EVENT)
        if isinstance(message, WireError):
            raise ObjectCacheError.from_wire(message)
        return message


class TargetClient(EventClient):
    """A session on the target socket, with one registered target."""

    def __init__(
        self, storage: StorageClient | SessionTicket, identity: str = "root", access_key: str = ""
    ) -> None:
        """Of a ticket that was had elsewhere, or of one that the storage server gives."""
        if isinstance(storage, SessionTicket):
            ticket = storage
        else:
            ask = CreateSession(identity=identity, access_key=access_key)
            ticket = storage.ask(ask, SessionTicket)
        super().__init__(ticket.socket_path)
        self.ticket = ticket
        self.send(JoinSession(v=PROTOCOL_VERSION, ticket=ticket.ticket))
        self.event()

    def register(self, length_bytes: int) -> tuple[bytes, mmap.mmap]:
        """A target of this session, and its memory."""
        descriptor = sealed_memory_file(length_bytes)
        try:
            memory = mmap.mmap(descriptor, length_bytes)
            self.send(RegisterTarget(length_bytes=length_bytes), descriptor)
        finally:
            os.close(descriptor)
        event = self.event()
        assert isinstance(event, TargetRegistered)
        return event.target_id, memory


def sealed_memory_file(length_bytes: int, seals: int = 0x0002 | 0x0004) -> int:
    """A memory file sealed against shrinking and growing."""
    descriptor = os.memfd_create("objectcache-test", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, length_bytes)
    fcntl.fcntl(descriptor, 1033, seals)  # F_ADD_SEALS
    return descriptor
