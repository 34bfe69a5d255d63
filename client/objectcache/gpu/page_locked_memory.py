"""Host memory that a device reads and writes by itself: memory files, registered with it once."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque

import numpy as np

from objectcache.gpu.device import Device
from objectcache.gpu.pieces import Numbers, Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.regions import SharedRegion
from objectcache.payload import Bytes
from objectcache_schemas.errors import InvalidRequest, Unavailable

_Spans = tuple[Numbers, Numbers, list[weakref.ref[MemoryFile]]]  # begins, ends, files


class PageLockedMemory:
    """What is page-locked for one device. Thread-safe.

    A memory file stays so for as long as it lives. Arrays over it may live longer, and are plain
    memory then.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._files: dict[int, weakref.ref[MemoryFile]] = {}
        self._lengths: dict[int, int] = {}
        self._ends: dict[int, weakref.finalize[..., MemoryFile]] = {}
        # A file may be collected at any moment, also while this thread has `_lock`. Its memory is
        # put down here, and whoever has `_lock` tells the device. The array keeps the mapping until
        # then.
        self._leaving: deque[tuple[int, Bytes]] = deque()
        self._lock = threading.Lock()
        self._spans = self._sorted_spans()

    def lock_pages(self, file: MemoryFile) -> None:
        """Page-lock a memory file; for a second time this has no effect. Raises `Unavailable`."""
        array = file.array()
        address = array.ctypes.data
        try:
            with self._lock:
                if address in self._lengths:
                    return
                self._device.lock_pages(address, file.length_bytes)
                self._lengths[address] = file.length_bytes
                self._files[address] = weakref.ref(file)
                # At the end of the process the driver may be gone before the file, and lets go of
                # everything itself.
                end = weakref.finalize(file, self._unlock, address, array)
                end.atexit = False
                self._ends[address] = end
                self._spans = self._sorted_spans()
        finally:
            self._unlock_leaving()

    def region(self, length_bytes: int) -> SharedRegion:
        """New memory for a `TargetPool`, page-locked. Raises `Unavailable`."""
        file = MemoryFile(length_bytes)
        self.lock_pages(file)
        return SharedRegion(file)

    def reaches(self, array: Bytes) -> bool:
        """Whether all memory of an array without negative strides is page-locked."""
        if not array.size:
            return True
        begin = array.ctypes.data
        steps = zip(array.shape, array.strides, strict=True)
        end = begin + sum((count - 1) * step for count, step in steps) + array.itemsize
        begins, ends, _ = self._spans
        span = int(np.searchsorted(begins, np.uint64(begin), side="right")) - 1
        return span >= 0 and end <= int(ends[span])

    def by_file(self, pieces: Pieces) -> list[tuple[MemoryFile, Pieces]]:
        """The pieces of each memory file apart, in their order: no copy crosses the border of two
        files, even where one lies behind the other. Whoever holds the files keeps them page-locked.

        Raises `InvalidRequest` unless the host's side of all pieces is page-locked.
        """
        if not len(pieces):
            return []
        begins, ends, files = self._spans
        span = np.searchsorted(begins, pieces.host, side="right").astype(np.int64) - 1
        if not (
            len(files)
            and (span >= 0).all()
            and (pieces.host + pieces.sizes_bytes <= ends[span]).all()
        ):
            raise _not_locked()
        first = int(span[0])
        if (span == first).all():
            return [(_alive(files[first]), pieces)]
        return [
            (_alive(files[index]), pieces.where(span == index))
            for index in np.unique(span).tolist()
        ]

    def _unlock(self, address: int, array: Bytes) -> None:
        self._leaving.append((address, array))
        self._unlock_leaving()

    def _unlock_leaving(self) -> None:
        # Whoever has `_lock` comes by here afterwards.
        while self._leaving and self._lock.acquire(blocking=False):
            try:
                while self._leaving:
                    address, _mapping = self._leaving.popleft()
                    del self._lengths[address], self._ends[address], self._files[address]
                    self._spans = self._sorted_spans()
                    with contextlib.suppress(Unavailable):  # a device that has failed lets go
                        self._device.unlock_pages(address)
                    del _mapping
            finally:
                self._lock.release()

    def _sorted_spans(self) -> _Spans:
        addresses = sorted(self._lengths)
        begins = np.array(addresses, np.uint64)
        lengths = np.array([self._lengths[address] for address in addresses], np.uint64)
        return begins, begins + lengths, [self._files[address] for address in addresses]

    def close(self) -> None:
        """Unlock everything; nothing is copied any more."""
        for end in list(self._ends.values()):
            end()

    def __repr__(self) -> str:
        return (
            f"<PageLockedMemory {len(self._lengths)} regions, {sum(self._lengths.values())} bytes>"
        )


def _alive(file: weakref.ref[MemoryFile]) -> MemoryFile:
    if (found := file()) is None:
        raise _not_locked()
    return found


def _not_locked() -> InvalidRequest:
    return InvalidRequest("host memory that is copied to a device must be page-locked for it")
