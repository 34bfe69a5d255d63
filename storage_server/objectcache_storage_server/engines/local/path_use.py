"""Reads of the volume, path by path: coordinated by the path's gate, and counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from objectcache_storage_server.engines.local.overlap import (
    GatedFragment,
    OverlapChooser,
    OverlapGate,
    forced_overlap,
)
from objectcache_storage_server.engines.local.volumes.volume import Path, Transfer, Volume


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

    def fragment(self, length_bytes: int, path: Path) -> GatedFragment:
        """A fragment of a path, to be entered once."""
        return self.gates[path].fragment(length_bytes)

    def read(self, transfers: Sequence[Transfer], path: Path) -> int:
        """Read from the volume; returns the bytes that were in memory. Raises `OSError`."""
        hit_bytes = self._volume.read(transfers, path)
        size_bytes = sum(len(memory) for _, memory in transfers)
        counts = self.counts[path]
        with self._lock:
            counts.read_bytes += size_bytes
            counts.hit_bytes += hit_bytes
        return hit_bytes
