"""What a fabric is to a delivery: a way to write into memory of another process or host.

A `Fabric` is this server's side, a `FabricPeer` one session's client on it. Bytes leave from
`StagingMemory`, which the fabric has registered. `staged` puts deliveries over it.
"""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from objectcache_schemas.errors import InvalidRequest, ObjectCacheError
from objectcache_storage_server.admission.buffers import BufferPool

WriteDone = Callable[[ObjectCacheError | None], None]
ADDRESS_MAX = 1 << 64
DRAM = "DRAM"
VRAM = "VRAM"


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """A client's memory as a fabric names it. Its numbers are never logged."""

    address: int
    length_bytes: int
    key: int = 0
    device_id: int = 0
    memory: str = DRAM

    def __post_init__(self) -> None:
        """Raises `InvalidRequest` for numbers that no memory has."""
        if self.address < 1 or self.length_bytes < 1:
            raise InvalidRequest("address and length_bytes must be 1 or more")
        if self.address + self.length_bytes > ADDRESS_MAX:
            raise InvalidRequest("address and length_bytes must lie within 64 bits")
        if not 0 <= self.key < 1 << 32 or not 0 <= self.device_id < 1 << 16:
            raise InvalidRequest("key must have 32 bits, device_id 16")
        if self.memory not in (DRAM, VRAM):
            raise InvalidRequest(f"memory must be {DRAM} or {VRAM}")

    def __repr__(self) -> str:
        return f"<RemoteMemory {self.length_bytes} bytes of {self.memory}>"


class StagingMemory(BufferPool):
    """Buffers that lie in one run of memory, which fabrics register once.

    Every piece takes a whole buffer. The one that came back last is handed out first: its bytes may
    still be in a processor's cache.
    """

    def __init__(self, buffer_bytes: int, capacity_bytes: int) -> None:
        count = max(1, capacity_bytes // buffer_bytes)
        super().__init__(buffer_bytes, count * buffer_bytes)
        self.memory = _large_pages(count * buffer_bytes)
        self._view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._free = list(range(count))
        self._withdrawn: set[int] = set()  # buffers that have not come back yet
        self._shrink_bytes = 0  # of buffers that have, and are still part of a grant

    @property
    def length_bytes(self) -> int:
        """Bytes of the whole, with what was withdrawn."""
        return len(self.memory)

    @property
    def shortage(self) -> str:
        return (
            f"{self.promised_bytes} bytes are being staged, storage.fabric_staging_bytes is "
            f"{self.length_bytes}"
        ) + (
            f", and {self.length_bytes - self.capacity_bytes} are out of use until the server is "
            "restarted: a device did not let go of them"
            if self.capacity_bytes < self.length_bytes
            else ""
        )

    def charged_bytes(self, length_bytes: int) -> int:
        return -(-length_bytes // self.buffer_bytes) * self.buffer_bytes

    def take(self, length_bytes: int) -> memoryview:
        with self._lock:
            begin = self._free.pop() * self.buffer_bytes
        return self._view[begin : begin + length_bytes]

    def put(self, view: memoryview) -> None:
        number = self.offset_of(view) // self.buffer_bytes
        with self._lock:
            if number in self._withdrawn:
                self._withdrawn.remove(number)
                self._shrink_bytes += self.buffer_bytes
            else:
                self._free.append(number)

    def withdraw(self, view: memoryview) -> None:
        """Keep a buffer that was taken out of use for good, because a device may still touch it.

        Whoever took it returns it with `put` as ever, takes no other in its place, and gives the
        grant back; that makes `capacity_bytes` smaller by it. Repeating has no effect.
        """
        with self._lock:
            self._withdrawn.add(self.offset_of(view) // self.buffer_bytes)

    def release(self, granted_bytes: int) -> None:
        with self._lock:
            shrunk_bytes = min(self._shrink_bytes, granted_bytes)
            self._shrink_bytes -= shrunk_bytes
            self.capacity_bytes -= shrunk_bytes
        super().release(granted_bytes)

    def offset_of(self, view: memoryview) -> int:
        """Where a piece of a buffer lies in the whole."""
        return ctypes.addressof(ctypes.c_char.from_buffer(view)) - self.address


def _large_pages(length_bytes: int) -> mmap.mmap:
    """Memory in pages as large as the system has, which copies walk through faster."""
    memory = mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class FabricPeer(ABC):
    """One session's client. Any thread may call it; no method but `admit` blocks.

    `done` callbacks come once each, from a thread of the fabric's own or, where the peer has ended,
    from within the call; they must not block. Until then the source belongs to the fabric;
    afterwards nothing of the fabric touches it, nor the remote memory on its behalf.
    """

    @abstractmethod
    def admit(self, memory: RemoteMemory, metadata: bytes) -> None:
        """Make sure that the memory can be written. May take a while.

        Raises `InvalidRequest` where the client's description does not fit, `Unavailable` where the
        client cannot be reached.
        """

    @abstractmethod
    def write(
        self, memory: RemoteMemory, offset_bytes: int, source: memoryview, done: WriteDone
    ) -> None:
        """Write staged bytes to memory that was admitted, within its bounds (an assertion).

        The error is `DeliveryFailed` where the client is gone, refuses the write, or has not taken
        it within storage.fabric_timeout_s; the peer is of no use any more then, and all its writes
        end so.
        """

    @abstractmethod
    def read(
        self, memory: RemoteMemory, offset_bytes: int, into: memoryview, done: WriteDone
    ) -> None:
        """Read from memory that was admitted into staging memory; otherwise as `write`."""

    @abstractmethod
    def announce(self, tag: int, end_layer: int) -> None:
        """Tell the client that its layers below `end_layer` are in place. They are: whoever calls
        has waited for their writes.
        """

    def forget(self, tag: int) -> None:  # noqa: B027 - where nothing waits there is nothing to drop
        """The delivery with this tag has ended, which its client is told otherwise: what was
        announced of it and has not left need not any more.
        """

    def when_broken(self, callback: Callable[[], None]) -> None:  # noqa: B027 - not all can tell
        """Have `callback` called once, from any thread, when the client was lost: before its writes
        end with that error, and at once where it is lost already. Not for `close`.
        """

    @abstractmethod
    def return_credits(self, count: int) -> None:
        """The client has taken this many announcements in all, and can take as many more; nothing
        where it needs no credits.
        """

    @abstractmethod
    def close(self) -> None:
        """End it: what has not been written fails, soon. Repeating has no effect."""


class Fabric(ABC):
    """This server's side of one fabric."""

    name: str

    @abstractmethod
    def open(self, endpoint: bytes) -> tuple[FabricPeer, bytes]:
        """A peer for a client's endpoint, and what that client is answered. May take a while.

        Raises `InvalidRequest` where the endpoint makes no sense, `Unavailable` where this host has
        no such fabric.
        """

    @abstractmethod
    def close(self) -> None:
        """Let the device and the staging memory go; no peer is open."""
