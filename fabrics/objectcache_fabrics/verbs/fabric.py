"""The side of verbs that writes: a device, its staging memory, and a thread for its completions."""

from __future__ import annotations

import threading
import weakref

from objectcache_fabrics.peers import NO_LANE, Fabric, FabricPeer, TrafficLane, WriteTimeout
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_fabrics.verbs.address import VerbsAddress
from objectcache_fabrics.verbs.completion_thread import CompletionThread
from objectcache_fabrics.verbs.device import VerbsDevice
from objectcache_fabrics.verbs.peer import VerbsPeer
from objectcache_fabrics.verbs.source_memory import SourceMemory
from objectcache_schemas.errors import InvalidRequest, Unavailable

TICK_S = 0.25  # deadlines are kept to this


class VerbsFabric(Fabric):
    """Clients on one RDMA device. Thread-safe."""

    name = "verbs"

    def __init__(
        self,
        staging: StagingMemory,
        device_name: str,
        timeout: WriteTimeout,
        lane: TrafficLane = NO_LANE,
    ) -> None:
        """Raises `Unavailable`, with what is missing: the library, the device, memory to lock."""
        self._timeout = timeout
        self._lane = lane
        self._device = VerbsDevice(device_name)
        try:
            self._sources = SourceMemory(self._device, staging)
        except Unavailable:
            self._device.close()
            raise
        self._thread = CompletionThread(TICK_S)
        self._lock = threading.Lock()
        self._peers: weakref.WeakSet[VerbsPeer] = weakref.WeakSet()

    def open(self, endpoint: bytes) -> tuple[FabricPeer, bytes]:
        client = VerbsAddress.from_bytes(endpoint)
        if not client.receives:
            raise InvalidRequest("endpoint.receives: a client takes one announcement at least")
        peer = VerbsPeer(
            self._device, self._sources, self._thread, client, self._timeout, self._lane
        )
        with self._lock:  # not before: connecting to one client shall keep no other waiting
            self._peers.add(peer)
        return peer, peer.address.to_bytes()

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers)
        for peer in peers:
            peer.close()
        self._thread.close()
        self._sources.close()
        self._device.close()

    def __repr__(self) -> str:
        return f"<VerbsFabric on {self._device.name}, {len(self._peers)} peers, {self._sources!r}>"
