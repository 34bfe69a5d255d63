"""How writers use the two paths: which one a new extent takes, and what the writes of each cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.residency.choose_write_path import WritePathChooser
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Transfer, Volume

MEASURED_BYTES_MIN = 1 * MIB  # of a write; what is shorter always goes by the budget alone


class WritePaths:
    """Safe to use from any thread."""

    def __init__(self, volume: Volume, *, may_leave_out: bool) -> None:
        """`may_leave_out`: extents that the budget admits may be written past the page cache."""
        self._volume = volume
        self._chooses = may_leave_out and len(volume.paths) == len(IoPath)
        self._chooser = WritePathChooser()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<WritePaths {self._chooser!r}>"

    def of_admitted(self, offset_bytes: int, length_bytes: int) -> IoPath:
        """The path of a new extent that the budget admits to the page cache. What is in memory
        already is written there.
        """
        if not self._chooses or length_bytes < MEASURED_BYTES_MIN:
            return IoPath.PAGE_CACHE
        with self._lock:
            path = self._chooser.choose(length_bytes)
        is_left_out = path is IoPath.DIRECT and self._is_new(offset_bytes, length_bytes)
        return IoPath.DIRECT if is_left_out else IoPath.PAGE_CACHE

    def write(self, transfers: Sequence[Transfer], path: IoPath) -> None:
        """As `Volume.write`; the time that it takes counts for its path."""
        length_bytes = sum(len(memory) for _, memory in transfers)
        if not self._chooses or length_bytes < MEASURED_BYTES_MIN:
            self._volume.write(transfers, path)
            return
        offset_bytes, memory = transfers[0]
        is_new = path is IoPath.DIRECT or self._is_new(offset_bytes, len(memory))
        begun_s = time.monotonic()
        self._volume.write(transfers, path)
        seconds = time.monotonic() - begun_s
        if is_new:
            with self._lock:
                self._chooser.wrote(path, length_bytes, seconds)

    def _is_new(self, offset_bytes: int, length_bytes: int) -> bool:
        """Whether the page cache would need memory for most of a range, as far as is known."""
        cached_bytes = self._volume.cached_bytes(offset_bytes, length_bytes)
        return cached_bytes is not None and cached_bytes < length_bytes // 2
