"""The memory that deliveries land in on their way: each region registered towards the storage
server as a target, and lent to the fabrics that it is written on over.

A byte is written into it and out of it. Into memory files of engines on this host, and into bodies,
it is copied.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from objectcache.landing.memory_file import MemoryFile, file_bytes_for
from objectcache.landing.targets import SessionTarget, Target
from objectcache_fabrics.peers import FabricPeer
from objectcache_fabrics.registered_memory import DeviceMemory
from objectcache_relay.landing.landing_grants import DELIVERIES_MAX

logger = logging.getLogger("objectcache.relay.landing")


class LandingMemory(NamedTuple):
    """Memory that the upstream fills. `file` is what it lies in, where other processes map it."""

    target: Target
    file: MemoryFile | None = None


class LandingRegion:
    """Memory for one delivery at a time. `view` is all of it."""

    def __init__(self, memory: LandingMemory) -> None:
        target, self.file = memory
        array = target.array
        self.target = target
        self.length_bytes = target.length_bytes
        self.view = array.data
        self._memory = DeviceMemory(array.ctypes.data, array.nbytes, array)
        self._peers: weakref.WeakSet[FabricPeer] = weakref.WeakSet()
        self.is_kept_by_fabric = False  # which may read it for ever

    @property
    def is_lost(self) -> bool:
        """Whether the storage server may write to it and cannot be asked: the SDK keeps what has to
        be kept, and nothing lands here again.
        """
        return isinstance(self.target, SessionTarget) and self.target.is_lost

    def lend_to(self, peer: FabricPeer) -> None:
        """Have this peer write from it. Raises as `FabricPeer.lend` does."""
        peer.lend(self._memory, self._lose)
        self._peers.add(peer)

    def _lose(self) -> None:
        self.is_kept_by_fabric = True

    def take_back(self) -> None:
        """Lend it to nobody any more; nothing is being written from it."""
        for peer in list(self._peers):
            peer.take_back(self._memory)

    def close(self) -> None:
        """Let it go; nothing moves into it or out of it. May take a while."""
        self.take_back()
        if isinstance(self.target, SessionTarget):
            self.target.close()

    def __repr__(self) -> str:
        return f"<LandingRegion {self.length_bytes} bytes>"


def region_bytes_for(payload_bytes: int) -> int:
    """How much landing memory a payload takes: there are few sizes, so that regions fit again."""
    return file_bytes_for(payload_bytes)


class LandingRegions:
    """Regions, kept for the next delivery of their size within `bytes_max`. Thread-safe; `take` and
    `close` may take a while.
    """

    def __init__(self, bytes_max: int, make: Callable[[int], LandingMemory]) -> None:
        """`make` gives registered memory of a length."""
        self._bytes_max = bytes_max
        self._make = make
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[LandingRegion]] = defaultdict(list)
        self._bytes = 0  # of all regions
        self._count = 0
        self._kept: list[LandingRegion] = []  # as long as the process lives: a fabric reads them

    @property
    def kept_bytes(self) -> int:
        """Bytes that are out of use for good, beside `bytes_max`."""
        return sum(region.length_bytes for region in self._kept)

    def take(self, length_bytes: int) -> LandingRegion:
        """A region of this length, which was granted. Raises what `make` does."""
        region = self.take_free(length_bytes)
        if region is not None:
            return region
        with self._lock:
            self._bytes += length_bytes
            self._count += 1
            surplus = self._surplus()
        for one in surplus:
            one.close()
        try:
            return LandingRegion(self._make(length_bytes))
        except BaseException:
            with self._lock:
                self._bytes -= length_bytes
                self._count -= 1
            raise

    def take_free(self, length_bytes: int) -> LandingRegion | None:
        """One that is there, else None."""
        lost: list[LandingRegion] = []
        with self._lock:
            region = self._free_one(length_bytes, lost)
        for one in lost:
            one.take_back()
        return region

    def _free_one(self, length_bytes: int, lost: list[LandingRegion]) -> LandingRegion | None:
        """Under the lock: a region of this length. Those that turn out to be lost, and are to be
        taken back, are added to `lost`.
        """
        free = self._free[length_bytes]
        while free:
            region = free.pop()
            if not region.is_lost:
                return region
            if self._forget(region):
                lost.append(region)
        return None

    def _surplus(self) -> list[LandingRegion]:
        """Under the lock: free regions that go, so that all fit."""
        surplus: list[LandingRegion] = []
        for free in self._free.values():
            while free and (self._bytes > self._bytes_max or self._count > DELIVERIES_MAX):
                region = free.pop()
                self._bytes -= region.length_bytes
                self._count -= 1
                surplus.append(region)
        return surplus

    def _forget(self, region: LandingRegion) -> bool:
        """Under the lock: a region that nothing lands in any more. Whether it is to be taken back,
        without the lock: over verbs that lets go of registered memory, which takes its time.
        """
        self._bytes -= region.length_bytes
        self._count -= 1
        if region.is_kept_by_fabric:
            self._kept.append(region)
            logger.warning("%r is out of use: a fabric may read it until this process ends", region)
        return not region.is_kept_by_fabric

    def put(self, region: LandingRegion) -> None:
        """Nobody uses it any more. One that was lost is not used again."""
        with self._lock:
            is_usable = not (region.is_lost or region.is_kept_by_fabric)
            if is_usable:
                self._free[region.length_bytes].append(region)
            is_taken_back = not is_usable and self._forget(region)
        if is_taken_back:
            region.take_back()

    def close(self) -> None:
        """Let all go that is free."""
        with self._lock:
            free = [region for regions in self._free.values() for region in regions]
            self._free.clear()
        for region in free:
            region.close()

    def __repr__(self) -> str:
        return f"<LandingRegions {self._bytes}/{self._bytes_max} bytes>"
