"""The side of a fabric that writes into memory of another process or host, and reads from it.

A `Fabric` is this process' side, a `FabricPeer` one client on it. Bytes leave from `StagingMemory`,
which the fabric has registered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from objectcache_fabrics.registered_memory import DeviceMemory, RemoteMemory
from objectcache_schemas.errors import ObjectCacheError, Unsupported

WriteDone = Callable[[ObjectCacheError | None], None]


class WriteTimeout(NamedTuple):
    """How long a client may take for a piece, and what whoever set it calls it."""

    timeout_s: float
    name: str = ""

    def __str__(self) -> str:
        return f"{self.timeout_s:g} s" + (f" ({self.name})" if self.name else "")


class TrafficLane(NamedTuple):
    """How the network is told to treat what is written, over RDMA; 0 leaves it to the fabric.

    `traffic_class` is a byte of the IP header on RoCE, its DSCP x 4; `service_level` is
    InfiniBand's.
    """

    traffic_class: int = 0
    service_level: int = 0


NO_LANE = TrafficLane()


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
        """Write staged or lent bytes to memory that was admitted, within its bounds (an assertion).

        The error is `DeliveryFailed` where the client is gone, refuses the write, or has not taken
        it within the fabric's timeout; the peer is of no use any more then, and all its writes end
        so.
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

    def lend(self, memory: DeviceMemory, lost: Callable[[], None]) -> None:
        """Have pieces of this memory written, too, as those of staging memory are, until
        `take_back`. Lending it again changes nothing. `lost` is called where the fabric may touch
        the memory for ever, so that it must not be used again.

        Raises `Unsupported` where the fabric writes from staging memory alone, and `Unavailable`
        where it cannot register the memory.
        """
        raise Unsupported("this fabric writes from staging memory alone")

    def take_back(self, memory: DeviceMemory) -> None:  # noqa: B027 - where none is lent
        """Lend it no more; no write from it is under way. The peer keeps its owner alive until the
        fabric has let go of it.
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
    """A process' side of one fabric, from which it writes."""

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
