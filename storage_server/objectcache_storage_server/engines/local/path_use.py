"""Reads of the volume, path by path: coordinated by the path's gate, and counted."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence

from objectcache_storage_server.engines.local.overlap import (
    GatedFragment,
    OverlapChooser,
    OverlapGate,
    forced_overlap,
)
from objectcache_storage_server.engines.local.volumes.volume import Path, Transfer, Volume

MISSED_MAX = 65_536  # ranges remembered; older ones are forgotten


def _random_sample() -> int:
    """Which blocks an opening verifies where not all are. Numbers in turn could fall into step with
    who reads what.
    """
    return random.getrandbits(16)


class PathCounts:
    """Bytes read over one path since the start."""

    def __init__(self) -> None:
        self.read_bytes = 0
        self.hit_bytes = 0  # of them, found in memory


class PathUse:
    """How readers use the two paths. Safe to use from any thread."""

    def __init__(self, volume: Volume, overlap: str) -> None:
        """`overlap` is auto, intra or cross."""
        forced = forced_overlap(overlap)
        self.gates = {path: OverlapGate(OverlapChooser(forced)) for path in Path}
        self.counts = {path: PathCounts() for path in Path}
        self._volume = volume
        self._lock = threading.Lock()
        self.sample: Callable[[], int] = _random_sample
        self._missed: deque[tuple[int, int]] = deque(maxlen=MISSED_MAX)

    def fragment(self, length_bytes: int, path: Path) -> GatedFragment:
        """A fragment of a path, to be entered once."""
        return self.gates[path].fragment(length_bytes)

    def read(self, transfers: Sequence[Transfer], path: Path) -> int:
        """Read from the volume; returns the bytes that were in memory. Raises `OSError`."""
        hit_bytes = self._volume.read(transfers, path)
        self._count(path, sum(len(memory) for _, memory in transfers), hit_bytes)
        return hit_bytes

    def read_resident(self, transfer: Transfer) -> bool:
        """See `Volume.read_resident`."""
        is_resident = self._volume.read_resident(transfer)
        if is_resident:
            size_bytes = len(transfer.memory)
            self._count(Path.PAGE_CACHE, size_bytes, size_bytes)
        return is_resident

    def read_missing(self, transfers: Sequence[Transfer]) -> None:
        """Read what `read_resident` did not find, the quickest way, and remember it for `missed`.

        A cold read through the page cache reaches a fifth of the direct path's rate.
        """
        has_direct = Path.DIRECT in self._volume.paths
        self._volume.read(transfers, Path.DIRECT if has_direct else Path.PAGE_CACHE)
        self._count(Path.PAGE_CACHE, sum(len(memory) for _, memory in transfers), 0)
        if has_direct:
            self._missed.extend((offset, len(memory)) for offset, memory in transfers)

    def take_missed(self, bytes_max: int) -> list[tuple[int, int]]:
        """Up to about `bytes_max` of the (offset, length) ranges that were not found in memory, in
        the order in which they were wanted.
        """
        taken: list[tuple[int, int]] = []
        taken_bytes = 0
        while self._missed and taken_bytes < bytes_max:
            taken.append(self._missed.popleft())
            taken_bytes += taken[-1][1]
        return taken

    def _count(self, path: Path, read_bytes: int, hit_bytes: int) -> None:
        counts = self.counts[path]
        with self._lock:
            counts.read_bytes += read_bytes
            counts.hit_bytes += hit_bytes
