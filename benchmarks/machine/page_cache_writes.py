"""A limit of the machine: plain writes through the page cache, into space that nobody wrote before.

What the page cache takes has to be memory first. A hypervisor that takes back what its machine
leaves free provides each page anew when it is written to, and that may take longer than the device.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.basis.measure import Samples, timed
from objectcache_storage_server.engines.local.direct.kernel_facts import start_write_back

PIECE_BYTES = 1 << 20
CACHED_FRESH = "limit: write through the page cache and fsync, fresh space, 1m in 1 thread"


class PageCacheWrites:
    """Writes a preallocated file of its own each time, and keeps it: another one's pages, freed,
    would be memory that is there.
    """

    def __init__(self, folder: Path, payload: memoryview) -> None:
        self._folder = folder
        self._payload = payload
        self._count = 0

    def take(self, samples: Samples) -> None:
        """Write everything once, to the device and into memory."""
        file = self._folder / f"cached-{self._count}"
        self._count += 1
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, len(self._payload))
            os.fsync(descriptor)
            samples.add(CACHED_FRESH, timed(lambda: self._write(descriptor)))
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int) -> None:
        for offset in range(0, len(self._payload), PIECE_BYTES):
            piece = self._payload[offset : offset + PIECE_BYTES]
            written = os.pwrite(descriptor, piece, offset)
            assert written == len(piece)
            start_write_back(descriptor, offset, written)
        os.fsync(descriptor)
