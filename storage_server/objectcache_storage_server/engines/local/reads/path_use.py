"""Reads of the volume, path by path: how readers share the device, and how much they read.

An extent on the page-cache path that is not in memory is *cold*: it is read past the page cache,
whole batches at once, and brought into it when readers leave the device alone. Asking the page
cache for what it does not have would have the kernel read it there and then, beside the reader.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from objectcache_storage_server.engines.local.reads.device_sharing import (
    RunningFragment,
    SharedDevice,
    SharingChooser,
    forced_sharing,
)
from objectcache_storage_server.engines.local.volumes.volume import (
    BLOCK_BYTES,
    IoPath,
    Transfer,
    Volume,
)

SAMPLES = 8  # blocks of an extent that are looked for; all there: it is taken to be in memory
QUIET_S = 0.05  # without a reader at the device, which is nobody's then

log = logging.getLogger("objectcache.storage_server.engines.local.path_use")


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

    def __init__(self, volume: Volume, sharing: str) -> None:
        """`sharing` is auto, intra or cross."""
        forced = forced_sharing(sharing)
        self.devices = {path: SharedDevice(SharingChooser(forced)) for path in IoPath}
        self.counts = {path: PathCounts() for path in IoPath}
        self.volume = volume
        self._lock = threading.Lock()
        self.stale_reads = 0
        self.sample: Callable[[], int] = _random_sample
        self._missing: dict[int, None] = {}  # extents, in the order in which they were wanted
        self._device_read_s = self._put_wrote_s = float("-inf")

    def fragment(self, length_bytes: int, path: IoPath) -> RunningFragment:
        """A fragment of a path, to be entered once."""
        return self.devices[path].fragment(length_bytes)

    def read(self, transfers: Sequence[Transfer], path: IoPath, cold_bytes: int = 0) -> int:
        """Read from the volume; returns the bytes that were in memory. Raises `OSError`.

        `cold_bytes` of them are read directly and were to be in the page cache, whose they count
        as.
        """
        hit_bytes = self.volume.read(transfers, path)
        self._device_read_s = time.monotonic()
        self._count(path, sum(len(memory) for _, memory in transfers) - cold_bytes, hit_bytes)
        if cold_bytes:
            self._count(IoPath.PAGE_CACHE, cold_bytes, 0)
        return hit_bytes

    def count_found(self, found_bytes: int) -> None:
        """Count what `volume.read_resident` has read for somebody."""
        self._count(IoPath.PAGE_CACHE, found_bytes, found_bytes)

    def read_missing(self, transfers: Sequence[Transfer]) -> None:
        """Read what `read_resident` did not find, the quickest way.

        A cold read through the page cache reaches two thirds of the direct path's rate at most.
        """
        path = IoPath.DIRECT if self.has_direct else IoPath.PAGE_CACHE
        self.volume.read(transfers, path)
        self._device_read_s = time.monotonic()
        self._count(IoPath.PAGE_CACHE, sum(len(memory) for _, memory in transfers), 0)

    def read_again(self, transfer: Transfer) -> None:
        """Read from the device what the page cache had, and have the cache forget it."""
        offset_bytes, memory = transfer
        self.volume.drop_cache(offset_bytes, len(memory))
        self.volume.read([transfer], IoPath.DIRECT if self.has_direct else IoPath.PAGE_CACHE)

    def count_stale(self, transfer: Transfer) -> None:
        """What was read again is what was stored: the cache had something else."""
        with self._lock:
            self.stale_reads += 1
        log.error(
            "the page cache had other bytes than the device: %d at %d of the volume",
            len(transfer.memory),
            transfer.offset_bytes,
        )

    @property
    def has_direct(self) -> bool:
        """Whether what is not in memory can be read past the page cache."""
        return IoPath.DIRECT in self.volume.paths

    def seems_resident(self, offset_bytes: int, length_bytes: int) -> bool:
        """Whether a few blocks of a range, one of each part, are all in the page cache. What is not
        there costs the device one block.
        """
        blocks = length_bytes // BLOCK_BYTES
        parts = min(SAMPLES, blocks)
        memory = memoryview(bytearray(BLOCK_BYTES))
        for part in range(parts):
            low, high = part * blocks // parts, (part + 1) * blocks // parts
            block_offset_bytes = (low + random.getrandbits(32) % (high - low)) * BLOCK_BYTES
            if not self.volume.read_resident(Transfer(offset_bytes + block_offset_bytes, memory)):
                return False
        return True

    # --- extents that are to come into memory ---

    def want_resident(self, extent: int) -> None:
        """A reader did not find this extent in memory."""
        with self._lock:
            self._missing[extent] = None

    def take_missing(self) -> int | None:
        """The extent that has been missing for longest."""
        with self._lock:
            extent = next(iter(self._missing), None)
            if extent is not None:
                del self._missing[extent]
            return extent

    def forget_missing(self) -> None:
        """Nothing is to come into memory."""
        with self._lock:
            self._missing.clear()

    @property
    def missing_count(self) -> int:
        """Extents that are to come into memory."""
        return len(self._missing)

    def is_quiet(self, now_s: float) -> bool:
        """Whether no reader has used the device for a while."""
        return now_s - self._device_read_s >= QUIET_S and not self.is_used

    def is_left_alone(self, now_s: float) -> bool:
        """Whether no put has written to the device for a while, and no reader uses it."""
        return now_s - self._put_wrote_s >= QUIET_S and not self.is_used

    def note_put(self) -> None:
        """A put writes to the device at this moment."""
        self._put_wrote_s = time.monotonic()

    @property
    def is_used(self) -> bool:
        """Whether a reader uses the device at this moment."""
        return any(device.readers for device in self.devices.values())

    def _count(self, path: IoPath, read_bytes: int, hit_bytes: int) -> None:
        counts = self.counts[path]
        with self._lock:
            counts.read_bytes += read_bytes
            counts.hit_bytes += hit_bytes
