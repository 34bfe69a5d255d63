"""How reads of the two paths are carried out, counted, and followed by a prefetch."""

from __future__ import annotations

from collections.abc import Sequence

from objectcache_storage_server.engines.local.path_use import PathUse
from objectcache_storage_server.engines.local.upkeep import joined
from objectcache_storage_server.engines.local.volumes.volume import Path, Transfer, Volume


class HalfResidentVolume(Volume):
    """Addresses below `resident_bytes` are in memory; every byte is its address, modulo 251."""

    segment_bytes = 1 << 20
    device_path = "none"

    def __init__(self, resident_bytes: int, paths: frozenset[Path]) -> None:
        self.paths = paths
        self.resident_bytes = resident_bytes
        self.asked: list[tuple[Path, int]] = []

    def read(self, transfers: Sequence[Transfer], path: Path) -> int:
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

    def write(self, transfers: Sequence[Transfer], path: Path) -> None:
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


def test_what_is_resident_counts_as_a_hit() -> None:
    use = PathUse(HalfResidentVolume(1000, frozenset(Path)), "auto")
    assert use.read_resident(transfer(0))
    assert not use.read_resident(transfer(950))
    counts = use.counts[Path.PAGE_CACHE]
    assert (counts.read_bytes, counts.hit_bytes) == (100, 100)
    assert use.take_missed(1 << 20) == []


def test_what_is_missing_is_read_past_the_page_cache_and_remembered() -> None:
    volume = HalfResidentVolume(0, frozenset(Path))
    use = PathUse(volume, "auto")
    use.read_missing([transfer(3000), transfer(1000), transfer(2000)])
    assert volume.asked == [(Path.DIRECT, 3000), (Path.DIRECT, 1000), (Path.DIRECT, 2000)]
    counts = use.counts[Path.PAGE_CACHE]
    assert (counts.read_bytes, counts.hit_bytes) == (300, 0)
    assert use.take_missed(150) == [(3000, 100), (1000, 100)]
    assert use.take_missed(150) == [(2000, 100)]
    assert use.take_missed(150) == []


def test_without_a_direct_path_the_page_cache_reads_what_it_lacks() -> None:
    volume = HalfResidentVolume(0, frozenset({Path.PAGE_CACHE}))
    use = PathUse(volume, "auto")
    use.read_missing([transfer(500)])
    assert volume.asked == [(Path.PAGE_CACHE, 500)]
    assert use.take_missed(1 << 20) == []


def test_ranges_that_touch_or_overlap_are_prefetched_as_one() -> None:
    assert joined([(300, 100), (0, 100), (100, 50), (120, 10), (151, 9)]) == [
        (0, 150),
        (151, 9),
        (300, 100),
    ]
    assert joined([]) == []
