"""The side of a fabric that writes into memory of another process or host, and reads from it.

A `Fabric` is this process' side, a `FabricPeer` one client on it. Bytes leave from `StagingMemory`,
which the fabric has registered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from objectcache_fabrics.registered_memory import RemoteMemory
from objectcache_schemas.errors import ObjectCacheError

WriteDone = Callable[[ObjectCacheError | None], None]


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
