"""Host memory that a device reads and writes by itself: memory files, registered with it once."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from objectcache.gpu.device import Device
from objectcache.gpu.pieces import Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.regions import SharedRegion
from objectcache_schemas.errors import InvalidRequest


class PinnedMemory:
    """What is pinned for one device. Thread-safe.

    A memory file stays pinned for as long as it lives. Arrays over it may live longer, and are
    plain memory then.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lengths: dict[int, int] = {}
        self._note_spans()
        self._ends: dict[int, weakref.finalize[..., MemoryFile]] = {}
        self._lock = threading.Lock()

    def pin(self, file: MemoryFile) -> None:
        """Pin a memory file; for a second time this has no effect. Raises `Unavailable`."""
        address = file.array().ctypes.data
        with self._lock:
            if address in self._lengths:
                return
            self._device.pin(address, file.length_bytes)
            self._lengths[address] = file.length_bytes
            self._note_spans()
            # A finalizer runs before the file lets go of its mapping. At the end of the process the
            # driver may be gone before it, and lets go of everything itself.
            self._ends[address] = weakref.finalize(file, self._unpin, address)
            self._ends[address].atexit = False

    def region(self, length_bytes: int) -> SharedRegion:
        """New memory for a `TargetPool`, pinned. Raises `Unavailable`."""
        file = MemoryFile(length_bytes)
        self.pin(file)
        return SharedRegion(file)

    def check(self, pieces: Pieces) -> None:
        """Raise `InvalidRequest` unless the host's side of all pieces is pinned."""
        if not len(pieces):
            return
        spans = self._spans
        span = np.searchsorted(spans[:, 0], pieces.host, side="right").astype(np.int64) - 1
        if len(spans):
            ends = spans[:, 0] + spans[:, 1]
            if (span >= 0).all() and (pieces.host + pieces.sizes_bytes <= ends[span]).all():
                return
        raise InvalidRequest("host memory that is copied to a device must be pinned for it")

    def _unpin(self, address: int) -> None:
        with self._lock:
            del self._lengths[address], self._ends[address]
            self._note_spans()
            self._device.unpin(address)

    def _note_spans(self) -> None:
        self._spans = np.array(sorted(self._lengths.items()), np.uint64).reshape(-1, 2)

    def close(self) -> None:
        """Unpin everything; nothing is copied any more."""
        for end in list(self._ends.values()):
            end()

    def __repr__(self) -> str:
        return f"<PinnedMemory {len(self._lengths)} regions, {sum(self._lengths.values())} bytes>"
