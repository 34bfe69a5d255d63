"""A blocking connection to the storage server's socket, beside which no admin API need run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from objectcache_runtime.settings import Settings
from objectcache_schemas.conversations import StorageReply
from objectcache_schemas.errors import InvalidRequest, ObjectCacheError, Unavailable, WireError
from objectcache_schemas.messages.frames import (
    LENGTH,
    MESSAGE_BYTES_MAX,
    FrameError,
    encode_frame,
    frame_length,
)
from objectcache_schemas.messages.handshake import Hello, Welcome
from objectcache_schemas.messages.message import PROTOCOL_VERSION, Message

R = TypeVar("R", bound=Message)

TIMEOUT_S = 30.0  # of silence; a check reports several times a second
RECEIVE_BYTES = 64 << 10

_REPLY: msgspec.msgpack.Decoder[StorageReply] = msgspec.msgpack.Decoder(StorageReply)


class StorageSocket:
    """A connection after its handshake.

    Every method raises `Unavailable` where the server went away or says nothing, and the error that
    the server answered with.
    """

    def __init__(self, settings: Settings) -> None:
        """Connect; errors name the path and what to do about it."""
        self._path = settings.storage_socket
        self._socket = _connect(self._path)
        try:
            self._greet(settings.limits.fingerprint())
        except BaseException:
            self.close()
            raise

    def _greet(self, limits_fingerprint: bytes) -> None:
        self.send(Hello(v=PROTOCOL_VERSION, limits_fingerprint=limits_fingerprint))
        try:
            self.receive(Welcome)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"the storage server at {self._path} is of another version or has other [limits]; "
                "give the --config and --set that it was started with"
            ) from error

    def ask(self, request: Message, reply_type: type[R]) -> R:
        """Send a request and return its one reply."""
        self.send(request)
        return self.receive(reply_type)

    def send(self, message: Message) -> None:
        """Send a message. Raises `InvalidRequest` for text that is not Unicode."""
        try:
            frame = encode_frame(message)
        except UnicodeEncodeError as error:
            raise InvalidRequest("a name or key is not Unicode text") from error
        try:
            self._socket.sendall(frame)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, reply_type: type[R]) -> R:
        """The next message, which must be of this type."""
        reply = self._receive_reply()
        if isinstance(reply, WireError):
            raise ObjectCacheError.from_wire(reply)
        if not isinstance(reply, reply_type):
            raise ObjectCacheError(
                f"the storage server answered {type(reply).__name__}, not {reply_type.__name__}"
            )
        return reply

    def _receive_reply(self) -> StorageReply:
        try:
            length_bytes = frame_length(self._receive_bytes(LENGTH.size), MESSAGE_BYTES_MAX)
            return _REPLY.decode(self._receive_bytes(length_bytes))
        except (FrameError, msgspec.MsgspecError) as error:
            raise ObjectCacheError(f"{self._path} is no storage server: {error}") from error

    def _receive_bytes(self, length_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < length_bytes:
            try:
                piece = self._socket.recv(min(RECEIVE_BYTES, length_bytes - len(data)))
            except OSError as error:
                raise self._lost(error) from error
            if not piece:
                raise self._lost(None)
            data += piece
        return bytes(data)

    def _lost(self, error: OSError | None) -> Unavailable:
        if isinstance(error, TimeoutError):
            return Unavailable(
                f"the storage server at {self._path} says nothing for {TIMEOUT_S:g} s; see its log"
            )
        return Unavailable(f"the storage server at {self._path} ended; see its log")

    def close(self) -> None:
        """Close; the server ends what it does for this connection."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StorageSocket {self._path}>"


def _connect(path: Path) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(TIMEOUT_S)
    try:
        connected.connect(str(path))
    except OSError as error:
        connected.close()
        raise Unavailable(_why_not(path, error)) from error
    return connected


def _why_not(path: Path, error: OSError) -> str:
    """Why there is no connection, and the remedy."""
    if isinstance(error, PermissionError):
        return f"{path} may not be opened: permission denied; run this as the server's own user"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return (
            f"no storage server runs there: {path} does not exist; give the --data-dir (or "
            "--config, --set server.run_dir=DIR) of a running server, or start one"
        )
    if isinstance(error, ConnectionRefusedError):
        return f"no storage server listens at {path} any more; start it again"
    return f"{path} cannot be connected: {error.strerror or error}"
