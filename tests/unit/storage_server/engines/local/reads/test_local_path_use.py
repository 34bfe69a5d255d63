"""How reads of the two paths are carried out and counted, and what is to come into memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

from objectcache_storage_server.engines.local.reads.path_use import QUIET_S, PathUse
from objectcache_storage_server.engines.local.upkeep.upkeep_thread import joined
from objectcache_storage_server.engines.local.volumes.volume import (
    BLOCK_BYTES,
    IoPath,
    Transfer,
    Volume,
)


class HalfResidentVolume(Volume):
    """Addresses below `resident_bytes` are in memory; every byte is its address, modulo 251."""

    segment_bytes = 1 << 20
    device_path = "none"

    def __init__(self, resident_bytes: int, paths: frozenset[IoPath]) -> None:
        self.paths = paths
        self.resident_bytes = resident_bytes
        self.asked: list[tuple[IoPath, int]] = []

    def read(self, transfers: Sequence[Transfer], path: IoPath) -> int:
        for offset_bytes, memory in transfers:
            self.asked.append((path, offset_bytes))
            self._fill(offset_bytes, memory)
        return 0

    def read_resident(self, transfer: Transfer) -> bool:
        if transfer.offset_bytes + len(transfer.memory) > self.resident_bytes:
            return False
        self._fill(*transfer)
        return True

    def _fill(self, offset_bytes: int, memory: memoryview) -> None:
        memory[:] = bytes((offset_bytes + index) % 251 for index in range(len(memory)))

    def segments(self) -> Sequence[int]:
        return [0]

    def extend(self) -> int:
        raise NotImplementedError

    def remove(self, segment: int) -> None:
        raise NotImplementedError

    def room_bytes(self) -> int:
        return 0

    def write(self, transfers: Sequence[Transfer], path: IoPath) -> None:
        raise NotImplementedError

    def flush(self, ranges: Sequence[tuple[int, int]]) -> None:
        raise NotImplementedError

    def drop_cache(self, offset_bytes: int, length_bytes: int) -> None:
        raise NotImplementedError

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


def transfer(offset_bytes: int, length_bytes: int = 100) -> Transfer:
    return Transfer(offset_bytes, memoryview(bytearray(length_bytes)))


def test_what_was_found_in_memory_counts_as_read_and_as_a_hit() -> None:
    use = PathUse(HalfResidentVolume(1000, frozenset(IoPath)), "auto")
    use.count_found(100)
    counts = use.counts[IoPath.PAGE_CACHE]
    assert (counts.read_bytes, counts.hit_bytes) == (100, 100)


def test_what_is_missing_is_read_past_the_page_cache() -> None:
    volume = HalfResidentVolume(0, frozenset(IoPath))
    use = PathUse(volume, "auto")
    use.read_missing([transfer(3000), transfer(1000), transfer(2000)])
    assert volume.asked == [(IoPath.DIRECT, 3000), (IoPath.DIRECT, 1000), (IoPath.DIRECT, 2000)]
    counts = use.counts[IoPath.PAGE_CACHE]
    assert (counts.read_bytes, counts.hit_bytes) == (300, 0)


def test_without_a_direct_path_the_page_cache_reads_what_it_lacks() -> None:
    volume = HalfResidentVolume(0, frozenset({IoPath.PAGE_CACHE}))
    use = PathUse(volume, "auto")
    use.read_missing([transfer(500)])
    assert volume.asked == [(IoPath.PAGE_CACHE, 500)]
    assert not use.has_direct


def test_a_direct_read_of_what_belongs_in_memory_counts_as_a_miss_of_the_page_cache() -> None:
    use = PathUse(HalfResidentVolume(0, frozenset(IoPath)), "auto")
    use.read([transfer(0), transfer(5000)], IoPath.DIRECT, cold_bytes=100)
    assert use.counts[IoPath.PAGE_CACHE].read_bytes == 100
    assert use.counts[IoPath.PAGE_CACHE].hit_bytes == 0
    assert use.counts[IoPath.DIRECT].read_bytes == 100


def test_an_extent_of_which_a_quarter_is_missing_does_not_seem_resident() -> None:
    extent_bytes = 64 * BLOCK_BYTES
    use = PathUse(HalfResidentVolume(extent_bytes, frozenset(IoPath)), "auto")
    assert use.seems_resident(0, extent_bytes)
    assert use.seems_resident(extent_bytes - BLOCK_BYTES, BLOCK_BYTES)
    assert not use.seems_resident(16 * BLOCK_BYTES, extent_bytes)


def test_missing_extents_come_in_the_order_in_which_they_were_wanted_each_once() -> None:
    use = PathUse(HalfResidentVolume(0, frozenset(IoPath)), "auto")
    for extent in (5, 3, 5, 9):
        use.want_resident(extent)
    assert use.missing_count == 3
    assert [use.take_missing() for _ in range(4)] == [5, 3, 9, None]


def test_the_device_is_quiet_a_while_after_its_last_reader() -> None:
    use = PathUse(HalfResidentVolume(0, frozenset(IoPath)), "auto")
    assert use.is_quiet(time.monotonic())
    begun_s = time.monotonic()
    use.read([transfer(0)], IoPath.DIRECT)
    assert not use.is_quiet(begun_s)
    later_s = time.monotonic() + QUIET_S
    assert use.is_quiet(later_s)
    with use.fragment(100, IoPath.DIRECT):
        assert not use.is_quiet(later_s)


def test_ranges_that_touch_or_overlap_are_prefetched_as_one() -> None:
    assert joined([(300, 100), (0, 100), (100, 50), (120, 10), (151, 9)]) == [
        (0, 150),
        (151, 9),
        (300, 100),
    ]
    assert joined([]) == []
