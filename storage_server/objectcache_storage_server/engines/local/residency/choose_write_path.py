"""By which path an extent is written whose pages are not in memory yet. Pure.

What the page cache is to keep has to be memory first. Where a hypervisor takes back what its
machine leaves free, new memory may come slower than the device writes. Both rates are measured as
bytes are written, and a path that is not used is tried again, seldom.

Put through the page cache, bytes are read from memory at first; put past it, from the device, which
takes about as long as the put. So the page cache is worth half of the direct path's rate, and only
below that is it left out.
"""

from __future__ import annotations

from objectcache_schemas.limits import GIB, MIB
from objectcache_storage_server.engines.local.volumes.volume import IoPath

AMPLE_BYTES_PER_S = 1 * GIB  # of the page cache; the direct path is not even tried then
WORTH_RATIO = 0.5  # of the direct path's rate: see above
KNOWN_BYTES = 16 * MIB  # after which a rate is known
HALF_LIFE_BYTES = 16 * MIB  # what is measured before counts half
TRIAL_PART = 1 / 32  # of the time of writes, that trials of the other path may take


class _RunningRate:
    def __init__(self) -> None:
        self._bytes = self._seconds = 0.0
        self._seen_bytes = 0

    def add(self, length_bytes: int, seconds: float) -> None:
        kept = 0.5 ** (length_bytes / HALF_LIFE_BYTES)
        self._bytes = self._bytes * kept + length_bytes
        self._seconds = self._seconds * kept + seconds
        self._seen_bytes += length_bytes

    @property
    def bytes_per_s(self) -> float | None:
        """None until it is known."""
        if self._seen_bytes < KNOWN_BYTES or self._seconds <= 0:
            return None
        return self._bytes / self._seconds


class WritePathChooser:
    """Not thread-safe: its owner calls it under a lock."""

    def __init__(self) -> None:
        self._rates = {path: _RunningRate() for path in IoPath}
        self._seconds = 0.0  # of writes since the last trial

    def __repr__(self) -> str:
        rates = ", ".join(
            f"{path.name.lower()} {rate.bytes_per_s / MIB:.0f} MiB/s"
            for path, rate in self._rates.items()
            if rate.bytes_per_s is not None
        )
        return f"<WritePathChooser {rates or 'nothing measured'}>"

    def wrote(self, path: IoPath, length_bytes: int, seconds: float) -> None:
        """Bytes were written past the page cache, or were new to it."""
        self._rates[path].add(length_bytes, seconds)
        self._seconds += seconds

    def choose(self, length_bytes: int) -> IoPath:
        """The path of an extent that is to be written and is not in memory."""
        cached = self._rates[IoPath.PAGE_CACHE].bytes_per_s
        direct = self._rates[IoPath.DIRECT].bytes_per_s
        if cached is None or cached >= AMPLE_BYTES_PER_S:
            return IoPath.PAGE_CACHE
        if direct is None:
            return IoPath.DIRECT
        if cached < WORTH_RATIO * direct:
            best, other, other_bytes_per_s = IoPath.DIRECT, IoPath.PAGE_CACHE, cached
        else:
            best, other, other_bytes_per_s = IoPath.PAGE_CACHE, IoPath.DIRECT, direct
        if length_bytes / other_bytes_per_s > TRIAL_PART * self._seconds:
            return best
        self._seconds = 0.0
        return other
