"""Into memory that a client on the same host registered: the engine reads straight into it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from objectcache_fabrics.ring_room import RingRoom
from objectcache_schemas.errors import ObjectCacheError
from objectcache_schemas.messages.sessions import DeliveryFailure, LayersReady
from objectcache_storage_server.transports.base import Transport
from objectcache_storage_server.transports.targets import Lease


class SharedMemoryTransport(Transport):
    """Writes under a lease, and announces layers to the session that registered the target.

    `post` sends an event to that session, from any thread, without waiting.
    """

    name = "shared_memory"

    def __init__(
        self,
        lease: Lease,
        tag: int,
        post: Callable[[msgspec.Struct], None],
        ring: RingRoom | None = None,
    ) -> None:
        """With a `ring` layers wait until there is room in it."""
        self._lease = lease
        self._tag = tag
        self._post = post
        self._ring = ring

    def reserve(self, offset_bytes: int, length_bytes: int) -> bool:
        return self._ring is None or self._ring.has_room(offset_bytes)

    def memory(self, offset_bytes: int, length_bytes: int) -> memoryview:
        self._lease.target.check_whole()
        start_bytes = self._lease.place_bytes(offset_bytes)
        return self._lease.view[start_bytes : start_bytes + length_bytes]

    def written(self, offset_bytes: int, length_bytes: int) -> None:
        """The bytes are where they belong already."""

    def announce(self, end_layer: int) -> None:
        if self._ring is not None:
            self._ring.announced(end_layer)
        self._post(LayersReady(tag=self._tag, end_layer=end_layer))

    def fail(self, failed_layer: int, error: ObjectCacheError) -> None:
        self._post(DeliveryFailure(tag=self._tag, failed_layer=failed_layer, error=error.to_wire()))

    def close(self) -> None:
        self._lease.end()
