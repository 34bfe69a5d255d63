"""Landing memory is used again by deliveries of its size, and within its bound."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.regions import SharedRegion
from objectcache.landing.targets import PlainTarget, SharedMemoryTarget
from objectcache_fabrics.peers import FabricPeer, WriteDone
from objectcache_fabrics.registered_memory import DeviceMemory, RemoteMemory
from objectcache_relay.landing.landing_grants import DELIVERIES_MAX
from objectcache_relay.landing.landing_regions import LandingMemory, LandingRegion, LandingRegions
from objectcache_schemas.errors import Unavailable


def made(length_bytes: int) -> LandingMemory:
    return LandingMemory(PlainTarget(np.zeros(length_bytes, np.uint8)))


class LendingPeer(FabricPeer):
    """Remembers what it was lent."""

    def __init__(self) -> None:
        self.lent: dict[DeviceMemory, Callable[[], None]] = {}

    def lend(self, memory: DeviceMemory, lost: Callable[[], None]) -> None:
        self.lent[memory] = lost

    def take_back(self, memory: DeviceMemory) -> None:
        del self.lent[memory]

    def admit(self, memory: RemoteMemory, metadata: bytes) -> None:
        raise AssertionError("not asked here")

    def write(
        self, memory: RemoteMemory, offset_bytes: int, source: memoryview, done: WriteDone
    ) -> None:
        raise AssertionError("not asked here")

    def read(
        self, memory: RemoteMemory, offset_bytes: int, into: memoryview, done: WriteDone
    ) -> None:
        raise AssertionError("not asked here")

    def announce(self, tag: int, end_layer: int) -> None:
        raise AssertionError("not asked here")

    def return_credits(self, count: int) -> None:
        raise AssertionError("not asked here")

    def close(self) -> None:
        raise AssertionError("not asked here")


def test_a_region_is_used_again_by_a_delivery_of_its_size() -> None:
    regions = LandingRegions(100, made)
    region = regions.take(40)
    regions.put(region)
    assert regions.take(40) is region
    assert regions.take(40) is not region


def test_free_regions_of_other_sizes_go_where_there_is_no_room_and_peers_lose_them() -> None:
    regions, peer = LandingRegions(100, made), LendingPeer()
    small, other = regions.take(40), regions.take(40)
    small.lend_to(peer)
    regions.put(small)
    assert len(peer.lent) == 1
    large = regions.take(60)
    assert large.length_bytes == 60
    assert peer.lent == {}
    regions.put(other)
    assert regions.take(40) is other


def test_memory_that_a_fabric_may_touch_for_ever_is_kept_and_never_used_again() -> None:
    regions, peer = LandingRegions(100, made), LendingPeer()
    region = regions.take(40)
    region.lend_to(peer)
    for lost in peer.lent.values():
        lost()
    regions.put(region)
    assert regions.kept_bytes == 40
    assert regions.take(40) is not region


def test_memory_that_was_lost_with_its_session_is_lent_to_nobody_and_not_landed_in() -> None:
    def shared(length_bytes: int) -> LandingMemory:
        return LandingMemory(SharedMemoryTarget(SharedRegion(MemoryFile(length_bytes))))

    def lose(region: LandingRegion) -> None:
        landing = region.target.claim(0.0)
        landing.lose()

    regions, peer = LandingRegions(256 << 10, shared), LendingPeer()
    in_use, free = regions.take(64 << 10), regions.take(64 << 10)
    for region in (in_use, free):
        region.lend_to(peer)
    lose(in_use)
    regions.put(in_use)
    regions.put(free)
    assert len(peer.lent) == 1
    lose(free)
    assert regions.take(64 << 10) not in (in_use, free)
    assert peer.lent == {}
    assert regions.kept_bytes == 0
    assert repr(regions) == "<LandingRegions 65536/262144 bytes>"


def test_peers_lose_memory_while_others_may_take_and_put() -> None:
    locked = list[bool]()

    class LookingPeer(LendingPeer):
        """Over verbs this lets go of registered memory, which takes its time."""

        def take_back(self, memory: DeviceMemory) -> None:
            locked.append(regions._lock.locked())
            super().take_back(memory)

    def shared(length_bytes: int) -> LandingMemory:
        return LandingMemory(SharedMemoryTarget(SharedRegion(MemoryFile(length_bytes))))

    regions, peer = LandingRegions(256 << 10, shared), LookingPeer()
    in_use, free = regions.take(64 << 10), regions.take(64 << 10)
    for region in (in_use, free):
        region.lend_to(peer)
    in_use.target.claim(0.0).lose()
    regions.put(in_use)
    regions.put(free)
    free.target.claim(0.0).lose()
    regions.take(64 << 10)
    assert locked == [False, False]


def test_there_are_no_more_regions_than_a_session_may_register() -> None:
    regions = LandingRegions(10_000, made)
    taken = [regions.take(1) for _ in range(DELIVERIES_MAX)]
    peer = LendingPeer()
    for region in taken:
        region.lend_to(peer)
        regions.put(region)
    regions.take(2)
    assert len(peer.lent) == DELIVERIES_MAX - 1


def test_memory_that_cannot_be_had_takes_no_room() -> None:
    def none(_: int) -> LandingMemory:
        raise Unavailable("no memory")

    regions = LandingRegions(100, none)
    with pytest.raises(Unavailable):
        regions.take(60)
    assert "0/100" in repr(regions)
