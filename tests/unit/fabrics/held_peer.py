"""A client on a fabric whose every move waits until a test lets it happen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from objectcache_fabrics.leased_memory import RemoteTargetMemory
from objectcache_fabrics.peers import FabricPeer, WriteDone
from objectcache_fabrics.registered_memory import RemoteMemory
from objectcache_runtime.networking.stream_socket import StreamSocket
from objectcache_schemas.errors import ObjectCacheError
from objectcache_storage_server.conversations.sessions import Session
from objectcache_storage_server.transports.targets import RegisteredTarget, TargetRegistry

ADDRESS = 0x7000_0000
DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class HeldMove:
    """A read or write that was asked for."""

    is_write: bool
    offset_bytes: int
    staged: memoryview
    done: WriteDone


class HeldPeer(FabricPeer):
    """`memory` is the client's, all of it registered. With `is_prompt` nothing waits."""

    def __init__(self, length_bytes: int, *, is_prompt: bool = False) -> None:
        self.memory = bytearray(length_bytes)
        self.is_prompt = is_prompt
        self.moves: list[HeldMove] = []
        self.asked = asyncio.Event()  # set by every move that is asked for
        self.announced: list[tuple[int, int]] = []

    @property
    def remote(self) -> RemoteMemory:
        return RemoteMemory(ADDRESS, len(self.memory))

    def admit(self, memory: RemoteMemory, metadata: bytes) -> None:
        assert memory == self.remote

    def write(
        self, memory: RemoteMemory, offset_bytes: int, source: memoryview, done: WriteDone
    ) -> None:
        self._hold(HeldMove(True, offset_bytes, source, done))

    def read(
        self, memory: RemoteMemory, offset_bytes: int, into: memoryview, done: WriteDone
    ) -> None:
        self._hold(HeldMove(False, offset_bytes, into, done))

    def _hold(self, move: HeldMove) -> None:
        assert 0 <= move.offset_bytes <= len(self.memory) - len(move.staged)
        self.moves.append(move)
        self.asked.set()
        if self.is_prompt:
            self.finish()

    async def until_held(self, count: int) -> None:
        """Wait until so many moves are held."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.moves) < count:
                self.asked.clear()
                await self.asked.wait()

    def finish(self, index: int = 0) -> None:
        """Have a move happen: the oldest, unless another is named."""
        move = self.moves.pop(index)
        end_bytes = move.offset_bytes + len(move.staged)
        if move.is_write:
            self.memory[move.offset_bytes : end_bytes] = move.staged
        else:
            move.staged[:] = self.memory[move.offset_bytes : end_bytes]
        move.done(None)

    def fail(self, error: ObjectCacheError) -> None:
        """Have the oldest move fail."""
        self.moves.pop(0).done(error)

    def announce(self, tag: int, end_layer: int) -> None:
        self.announced.append((tag, end_layer))

    def return_credits(self, count: int) -> None:
        """It needs none."""

    def close(self) -> None:
        """Nothing to end."""

    def register(
        self,
        registry: TargetRegistry,
        owner: Session,
        post: Callable[[msgspec.Struct], None],
    ) -> RegisteredTarget:
        """Its memory as a target of the session."""
        memory = RemoteTargetMemory("nixl", self.remote, self, post)
        return registry.register_remote(owner, memory)


class QuietSession(Session):
    """A session without a client, which keeps what is posted to it."""

    def __init__(self, identity: str, socket: StreamSocket) -> None:
        super().__init__(identity, socket)
        self.posted: list[msgspec.Struct] = []

    def post(self, message: msgspec.Struct) -> None:
        self.posted.append(message)

    async def is_given_up(self) -> bool:
        """Whether its end was asked for by now."""
        await asyncio.sleep(0)  # it is asked for in a turn of its own
        return self.broken.is_set()
