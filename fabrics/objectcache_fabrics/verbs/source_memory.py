"""What peers on one device write from: staging memory, and what they are lent."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from objectcache_fabrics.registered_memory import DeviceMemory
from objectcache_fabrics.staging_memory import StagingMemory
from objectcache_fabrics.verbs.device import VerbsDevice, VerbsRegion


@dataclass(slots=True)
class _Lent:
    region: VerbsRegion
    peers: int  # that may write from it


class SourceMemory:
    """Each memory is registered once for all peers, to be read by this process's own writes alone,
    and let go with the last peer that was lent it. Thread-safe.
    """

    def __init__(self, device: VerbsDevice, staging: StagingMemory) -> None:
        """Raises `Unavailable`, where the system locks no more memory for this process."""
        self.staging = staging
        self._device = device
        self._staged = self._register(staging.address, staging.length_bytes)
        self._lock = threading.Lock()
        self._lent: dict[DeviceMemory, _Lent] = {}

    @property
    def staging_key(self) -> int:
        """The device's key of the staging memory."""
        return self._staged.local_key

    def lend(self, memory: DeviceMemory) -> int:
        """One more peer writes from it; the device's key of it. Whoever is first has its pages
        locked, during which the interpreter stands still. Raises as the constructor does.
        """
        with self._lock:
            lent = self._lent.get(memory)
            if lent is None:
                region = self._register(memory.address, memory.length_bytes)
                lent = self._lent[memory] = _Lent(region, 0)
            lent.peers += 1
            return lent.region.local_key

    def take_back(self, memory: DeviceMemory) -> None:
        """One peer less, none of whose writes from it is under way. Raises `Unavailable` where the
        device does not let go of it; it stays registered, and its owner alive, then. So it does
        where a peer that never takes it back is left.
        """
        with self._lock:
            lent = self._lent[memory]
            lent.peers -= 1
            if not lent.peers:
                lent.region.close()
                del self._lent[memory]

    def _register(self, address: int, length_bytes: int) -> VerbsRegion:
        return self._device.register(address, length_bytes, remote_write=False, remote_read=False)

    def close(self) -> None:
        """Let the staging memory go; no peer is open. Repeating has no effect."""
        self._staged.close()

    def __repr__(self) -> str:
        return f"<SourceMemory {self.staging!r}, {len(self._lent)} lent>"
