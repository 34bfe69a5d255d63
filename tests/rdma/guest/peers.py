"""The two ends of a verbs connection for tests: a fabric with staging memory, and clients of it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from objectcache_fabrics.peers import WriteTimeout
from objectcache_fabrics.registered_memory import DeviceMemory, RemoteMemory
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_fabrics.verbs.address import Announcement, VerbsAddress
from objectcache_fabrics.verbs.endpoint import VerbsEndpoint
from objectcache_fabrics.verbs.fabric import VerbsFabric
from objectcache_fabrics.verbs.peer import VerbsPeer
from objectcache_fabrics.verbs.pyverbs_binding import load_pyverbs
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.messages.message import Message
from objectcache_schemas.messages.sessions import LayersReady, ReturnCredits

load_pyverbs()  # before processes are forked from one that has imported this
WAIT_S = 60.0
PIECE_BYTES = 64 << 10
PIECE_COUNT = 32


class Server:
    """A fabric, and what became of its writes."""

    def __init__(self, device: str = "rxe0", timeout_s: float = 30.0) -> None:
        self.staging = StagingMemory(PIECE_BYTES, PIECE_BYTES * PIECE_COUNT)
        self.fabric = VerbsFabric(self.staging, device, WriteTimeout(timeout_s))
        self._closed = False
        self.outcomes: queue.Queue[ObjectCacheError | None] = queue.Queue()

    def open(self, endpoint: bytes) -> tuple[VerbsPeer, bytes]:
        peer, answer = self.fabric.open(endpoint)
        assert isinstance(peer, VerbsPeer)
        return peer, answer

    def write(
        self, peer: VerbsPeer, memory: RemoteMemory, offset_bytes: int, content: bytes
    ) -> None:
        """Stage and write; the staging memory goes back when the write is done."""
        source = self.staging.take(len(content))
        source[:] = content
        peer.write(memory, offset_bytes, source, self.returning(source))

    def returning(self, staged: memoryview) -> Callable[[ObjectCacheError | None], None]:
        def done(error: ObjectCacheError | None) -> None:
            self.staging.put(staged)
            self.outcomes.put(error)

        return done

    def outcome(self) -> ObjectCacheError | None:
        return self.outcomes.get(timeout=WAIT_S)

    @property
    def idle_pieces(self) -> int:
        return len(self.staging._free)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.fabric.close()


class Client:
    """An endpoint with one target; what it hears and tells goes into queues."""

    def __init__(self, device: str = "rxe0", length_bytes: int = 1 << 20) -> None:
        self.heard: queue.Queue[Announcement] = queue.Queue()
        self.credits: queue.Queue[int] = queue.Queue()
        self.endpoint = VerbsEndpoint(device)
        self.array = np.zeros(length_bytes, np.uint8)

    def join(self, server: Server) -> VerbsPeer:
        """Connect as a session does: an endpoint each way, then the memory."""
        peer, answer = server.open(self.endpoint.hello())
        self.connect(answer)
        return peer

    def connect(self, answer: bytes) -> None:
        self.endpoint.connect(answer, self._hear, self._tell)
        address, length_bytes = self.array.ctypes.data, self.array.nbytes
        target, self.registered = self.endpoint.register(
            DeviceMemory(address, length_bytes, self.array)
        )
        self.memory = RemoteMemory(target.address, target.length_bytes, target.key)

    def _hear(self, ready: LayersReady) -> None:
        self.heard.put(Announcement(ready.tag, ready.end_layer))

    def _tell(self, message: Message) -> None:
        assert isinstance(message, ReturnCredits)
        self.credits.put(message.count)

    def next_heard(self) -> Announcement:
        return self.heard.get(timeout=WAIT_S)

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended by itself."""
        return self.endpoint._closing

    def wait_until_lost(self) -> None:
        thread = self.endpoint._thread
        assert thread is not None
        thread.join(WAIT_S)
        assert self.is_lost

    def close(self) -> None:
        self.endpoint.close()


def with_fewer_receives(endpoint: bytes, receives: int) -> bytes:
    """What a client with fewer posted receives would send."""
    return msgspec.structs.replace(VerbsAddress.from_bytes(endpoint), receives=receives).to_bytes()


def run_client(pipe: Any, device: str) -> None:
    """A client in a process of its own, until the pipe ends or it is killed. It answers `digest`
    with the bytes of its memory, `heard` with the next announcement.
    """
    client = Client(device)
    pipe.send(client.endpoint.hello())
    client.connect(pipe.recv())
    memory = client.memory
    pipe.send((memory.address, memory.length_bytes, memory.key))
    while True:
        match pipe.recv():
            case "bytes":
                pipe.send(client.array.tobytes())
            case "heard":
                pipe.send(client.next_heard())
            case _:
                return


def run_server(pipe: Any, device: str) -> None:
    """A server in a process of its own that writes to one client without end."""
    server = Server(device)
    peer, answer = server.open(pipe.recv())
    pipe.send(answer)
    address, length_bytes, key = pipe.recv()
    memory = RemoteMemory(address, length_bytes, key)
    pass_number = 0
    while True:
        pass_number += 1
        server.write(peer, memory, 0, bytes([pass_number % 256]) * PIECE_BYTES)
        assert server.outcome() is None
        peer.announce(1, pass_number % 4096)
