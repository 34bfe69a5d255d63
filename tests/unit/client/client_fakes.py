"""A gateway and a storage server for the client's tests: real sockets, scripted answers."""

from __future__ import annotations

import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from objectcache import Client, KvLayout
from objectcache.sessions.target_session import own_host_id
from objectcache_schemas.descriptor import Descriptor
from objectcache_schemas.limits import Limits
from objectcache_schemas.messages.frames import LENGTH, encode_frame
from objectcache_schemas.messages.sessions import (
    GetPrefix,
    JoinSession,
    LayersAwaited,
    LayersConsumed,
    RegisterTarget,
    ReleaseTarget,
    SessionJoined,
    SessionPing,
    SessionPong,
    TargetRegistered,
    TargetReleased,
    TargetRequest,
)

LAYOUT = KvLayout(
    num_layers=3, chunk_tokens=4, per_layer_chunk_bytes=40, dtype="uint8", fingerprint="test"
)
KEYS = ["a1", "b2", "c3", "d4", "e5"]
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Received:
    """One request as it arrived."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def descriptor(self) -> Descriptor:
        if "x-objectcache-descriptor" in self.headers:
            return Descriptor.from_header(self.headers["x-objectcache-descriptor"], Limits())
        return Descriptor.from_bytes(self.body, Limits())


class Peer:
    """The server's side of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._file = sock.makefile("rb")

    def receive(self) -> Received | None:
        """The next request; None at the end of the connection."""
        head: list[str] = []
        while (line := self._file.readline()) not in (b"\r\n", b""):
            head.append(line.decode().rstrip("\r\n"))
        if not head:
            return None
        method, target, _ = head[0].split(" ")
        pairs = (line.split(": ", 1) for line in head[1:])
        headers = {name.lower(): value for name, value in pairs}
        body = self._file.read(int(headers.get("content-length", "0")))
        return Received(method, target, headers, body)

    def answer(
        self,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        length_bytes: int | None = None,
    ) -> None:
        """Send a response; `length_bytes` announces more than `body` holds."""
        length_bytes = len(body) if length_bytes is None else length_bytes
        lines = [f"HTTP/1.1 {status} status", f"Content-Length: {length_bytes}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)

    def answer_delivery(
        self,
        mode: str,
        chunk_count: int,
        body: bytes = b"",
        length_bytes: int | None = None,
        slice_bytes: int = LAYOUT.per_layer_chunk_bytes,
    ) -> None:
        """The head of an accepted get, and what there is of its body."""
        headers = {
            "x-objectcache-delivery": mode,
            "x-objectcache-chunk-count": str(chunk_count),
            "x-objectcache-layer-bytes": str(chunk_count * slice_bytes),
            "x-objectcache-request-id": "request-1",
        }
        self.answer(200, headers, body, length_bytes)

    def start_outcome(self, mode: str, chunk_count: int) -> None:
        """The head of an accepted get with a target."""
        lines = [
            "HTTP/1.1 200 OK",
            "Transfer-Encoding: chunked",
            f"x-objectcache-delivery: {mode}",
            f"x-objectcache-chunk-count: {chunk_count}",
            "x-objectcache-request-id: request-1",
        ]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode())

    def send_outcome(self, **fields: Any) -> None:
        """The body that ends it."""
        body = msgspec.msgpack.encode({"v": 1, "chunk_count": 0, "payload_bytes": 0} | fields)
        self.socket.sendall(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")

    def wait_closed(self) -> None:
        """Return when the client has closed the connection."""
        self.socket.settimeout(DEADLINE_S)
        with suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):  # first, so that a thread that reads the file lets go of it
            self.socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self.socket.close()


class Listener:
    """Accepts connections and serves each in a thread, until the `with` block ends."""

    def __init__(self, sock: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        self._listening = sock
        self._serve_one = serve
        self._threads: list[threading.Thread] = []
        self._accepted: list[socket.socket] = []
        self.failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        sock.listen()
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            self._accepted.append(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            self._serve_one(sock)
        except ConnectionError:
            return
        except BaseException as error:
            self.failures.put(error)
        finally:
            sock.close()

    @property
    def connection_count(self) -> int:
        return len(self._accepted)

    def break_connections(self) -> None:
        for sock in self._accepted:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._acceptor.join(DEADLINE_S)
        self.break_connections()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a fake server's connection hangs"
        if not self.failures.empty():
            raise self.failures.get()


Handler = Callable[[Received, Peer], None]


class FakeGateway:
    """Serves each request by `handler`, which a test may replace at any time."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.requests: list[Received] = []
        sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.listener = Listener(sock, self._serve)

    def _serve(self, sock: socket.socket) -> None:
        peer = Peer(sock)
        try:
            while (request := peer.receive()) is not None:
                self.requests.append(request)
                self.handler(request, peer)
        except (OSError, ValueError):
            return  # the test ended the connection
        finally:
            peer.close()

    def client(self, **options: Any) -> Client:
        """A client of this gateway, by body unless told otherwise."""
        arguments: dict[str, Any] = {"transport": "body", "timeout_s": DEADLINE_S} | options
        return Client(self.url, access_key="key", secret_key="secret", **arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()


class FakeTargetSocket:
    """The storage server's target socket: maps what clients register, releases when told.

    Released targets are answered at once unless `hold_releases` is set; then `released` collects
    their ids until `answer_release`. `consumed` collects the clients' feedback,
    `awaited` what they wait for, where they are told that it `hears_awaited`.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "targets.sock"
        self.memory: dict[bytes, mmap.mmap] = {}
        self.registered_count = 0
        self.hold_releases = False
        self.released: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.consumed: queue.SimpleQueue[LayersConsumed] = queue.SimpleQueue()
        self.gets: queue.SimpleQueue[GetPrefix] = queue.SimpleQueue()
        self.hears_awaited = True
        self.awaited: queue.SimpleQueue[LayersAwaited] = queue.SimpleQueue()
        self.refuse: msgspec.Struct | None = None
        self.refuse_register: msgspec.Struct | None = None
        self._sessions: list[socket.socket] = []
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(self.path))
        self.listener = Listener(sock, self._serve)

    def invitation(self, host_id: str | None = None) -> bytes:
        """The body of an answer to ?kv-session."""
        return msgspec.msgpack.encode(
            {
                "v": 1,
                "ticket": b"ticket",
                "socket_path": str(self.path),
                "host_id": own_host_id() if host_id is None else host_id,
                "expires_s": 30.0,
            }
        )

    def send(self, message: msgspec.Struct) -> None:
        """Send an event to the latest session."""
        self._sessions[-1].sendall(encode_frame(message))

    def hang_up(self) -> None:
        """End the latest session."""
        self._sessions[-1].shutdown(socket.SHUT_RDWR)

    def answer_release(self) -> None:
        """Tell the client that the first held target is quiet."""
        self.send(TargetReleased(target_id=self.released.get(timeout=DEADLINE_S)))

    def _serve(self, sock: socket.socket) -> None:
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(TargetRequest)
        while True:
            data, descriptors, _, _ = socket.recv_fds(sock, LENGTH.size, 1)
            if not data:
                return
            (length,) = LENGTH.unpack(data)
            self._handle(sock, decoder.decode(sock.recv(length, socket.MSG_WAITALL)), descriptors)

    def _handle(self, sock: socket.socket, request: Any, descriptors: list[int]) -> None:
        match request:
            case JoinSession():
                self._sessions.append(sock)
                sock.sendall(encode_frame(self.refuse or SessionJoined(v=1)))
            case RegisterTarget() if self.refuse_register is not None:
                os.close(descriptors[0])
                sock.sendall(encode_frame(self.refuse_register))
            case RegisterTarget(length_bytes=length_bytes):
                self.registered_count += 1
                target_id = self.registered_count.to_bytes(16, "big")
                self.memory[target_id] = mmap.mmap(descriptors[0], length_bytes)
                os.close(descriptors[0])
                hears = self.hears_awaited
                sock.sendall(
                    encode_frame(TargetRegistered(target_id=target_id, hears_awaited=hears))
                )
            case SessionPing():
                sock.sendall(encode_frame(SessionPong()))
            case LayersConsumed():
                self.consumed.put(request)
            case LayersAwaited():
                self.awaited.put(request)
            case GetPrefix():
                self.gets.put(request)
            case ReleaseTarget(target_id=target_id):
                self.released.put(target_id)
                if not self.hold_releases:
                    self.answer_release()

    def close(self) -> None:
        self.listener.close()


def payload_of(chunk_count: int, mode: str = "layerwise", layout: KvLayout = LAYOUT) -> bytes:
    """The payload of the first chunks of a prefix, in the mode's order."""
    chunks = chunks_of(chunk_count, layout)
    return bytes((chunks if mode == "chunkwise" else chunks.transpose(1, 0, 2)).tobytes())


def chunks_of(chunk_count: int, layout: KvLayout = LAYOUT) -> Any:
    """Distinct bytes: uint8[chunk_count, num_layers, per_layer_chunk_bytes]."""
    shape = (chunk_count, layout.num_layers, layout.per_layer_chunk_bytes)
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)
