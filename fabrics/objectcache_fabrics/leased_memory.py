"""What whoever writes over a fabric is lent: a part of memory that a peer reaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from objectcache_fabrics.peers import FabricPeer
from objectcache_fabrics.registered_memory import RemoteMemory
from objectcache_schemas.errors import ObjectCacheError


@dataclass(frozen=True, slots=True)
class RemoteTargetMemory:
    """Memory that a fabric reaches. `post` sends an event to the session that registered it."""

    transport: str
    remote: RemoteMemory
    peer: FabricPeer
    post: Callable[[msgspec.Struct], None]

    @property
    def length_bytes(self) -> int:
        """Bytes of it."""
        return self.remote.length_bytes

    def close(self) -> None:
        """Nothing to let go: the peer's end takes care of it."""


class FabricLease(Protocol):
    """The right to `length_bytes` of a client's memory from `offset_bytes` on, until `end`."""

    offset_bytes: int
    length_bytes: int

    @property
    def remote(self) -> RemoteTargetMemory:
        """The memory that the part lies in."""
        ...

    def place_bytes(self, payload_offset_bytes: int) -> int:
        """Where a piece of the payload lies, counted from `offset_bytes`."""
        ...

    def on_release(self, cancel: Callable[[ObjectCacheError], None]) -> None:
        """Have `cancel` called when the client takes its memory away, at once if it has."""
        ...

    def end(self) -> None:
        """Nothing moves under it any more. A second call has no effect."""
        ...
