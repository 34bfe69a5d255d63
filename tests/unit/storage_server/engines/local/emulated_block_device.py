"""The block device of an emulated namespace, with a page cache that knows nothing of commands.

As hostile as the kernel's may be: what it reads brings neighbours along, it writes dirty pages back
when it likes, others read through it at any time, and pages that somebody has mapped stay.
"""

from __future__ import annotations

import random
import threading

from objectcache_storage_server.engines.local.direct.block_device import BlockDevice
from objectcache_storage_server.engines.local.volumes.nvme_superblock import HEADER_BYTES
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES
from tests.unit.storage_server.engines.local.emulated_nvme import EmulatedNvme

NEIGHBOURS = 8  # pages that are read along with one that was missing


class EmulatedBlockDevice(BlockDevice):
    """`pages` is the cache, by page number; `dirty` has those that the device lacks."""

    def __init__(self, device: EmulatedNvme, seed: int = 0) -> None:
        self.name = self.description = "emulated block device"
        self.pages: dict[int, bytearray] = {}
        self.dirty: set[int] = set()
        self.mapped: set[int] = set()
        self.flushes = 0
        self.failing_flushes = 0
        self.dropped: list[tuple[int, int]] = []
        self.drops_nothing = False  # and says it had: what the store relies on is taken away
        self._device = device
        self._chance = random.Random(seed)
        self._lock = threading.RLock()

    def read(self, offset_bytes: int, memory: memoryview) -> None:
        with self._lock:
            for page, begin, end in parts(offset_bytes, len(memory)):
                at = page * BLOCK_BYTES + begin - offset_bytes
                memory[at : at + end - begin] = self._page(page)[begin:end]

    def read_resident(self, offset_bytes: int, memory: memoryview) -> int:
        found = 0
        with self._lock:
            for page, begin, end in parts(offset_bytes, len(memory)):
                if page not in self.pages:
                    break
                memory[found : found + end - begin] = self.pages[page][begin:end]
                found += end - begin
        return found

    def prefetch(self, offset_bytes: int, length_bytes: int) -> None:
        with self._lock:
            for page, _, _ in parts(offset_bytes, length_bytes):
                self._page(page)

    def write(self, offset_bytes: int, memory: memoryview) -> None:
        with self._lock:
            for page, begin, end in parts(offset_bytes, len(memory)):
                at = page * BLOCK_BYTES + begin - offset_bytes
                if (begin, end) == (0, BLOCK_BYTES) and page not in self.pages:
                    self.pages[page] = bytearray(BLOCK_BYTES)
                self._page(page)[begin:end] = memory[at : at + end - begin]
                self.dirty.add(page)

    def write_back(self, offset_bytes: int, length_bytes: int) -> None:
        with self._lock:
            for page, _, _ in parts(offset_bytes, length_bytes):
                self._clean(page)

    def flush(self) -> None:
        with self._lock:
            self.flushes += 1
            for page in sorted(self.dirty):
                self._clean(page)
            if self.failing_flushes:
                self.failing_flushes -= 1
                raise OSError(5, "Input/output error")
            self._device.flush()

    def forget(self, offset_bytes: int, length_bytes: int) -> None:
        with self._lock:
            for page, _, _ in parts(offset_bytes, length_bytes):
                if (
                    page not in self.dirty
                    and page not in self.mapped
                    and self._chance.random() < 0.5
                ):
                    self.pages.pop(page, None)

    def drop(self, offset_bytes: int, length_bytes: int) -> bool:
        if self.drops_nothing:
            return True
        with self._lock:
            self.dropped.append((offset_bytes, length_bytes))
            numbers = [page for page, _, _ in parts(offset_bytes, length_bytes)]
            for page in numbers:
                if page not in self.dirty and page not in self.mapped:
                    self.pages.pop(page, None)
            return not any(page in self.pages for page in numbers)

    def read_past_cache(self, offset_bytes: int, length_bytes: int) -> bytes:
        with self._lock:
            return bytes(self._device.blocks[offset_bytes : offset_bytes + length_bytes])

    def close(self) -> None:
        """Nothing to release."""

    # --- what the rest of the system does ---

    def stir(self) -> None:
        """Write some dirty pages back, evict some, and have somebody else read some."""
        with self._lock:
            for page in list(self.dirty):
                if self._chance.random() < 0.2:
                    self._clean(page)
            for page in list(self.pages):
                if page not in self.dirty and self._chance.random() < 0.1:
                    del self.pages[page]
            pages = range(HEADER_BYTES // BLOCK_BYTES, len(self._device.blocks) // BLOCK_BYTES)
            for _ in range(4):
                self._page(self._chance.choice(pages))

    def _page(self, page: int) -> bytearray:
        if page not in self.pages:
            for number in range(page, page + NEIGHBOURS):
                begin = number * BLOCK_BYTES
                if number not in self.pages and begin < len(self._device.blocks):
                    self.pages[number] = bytearray(self.read_past_cache(begin, BLOCK_BYTES))
        return self.pages[page]

    def _clean(self, page: int) -> None:
        if page in self.dirty:
            self.dirty.remove(page)
            self._device.change(page * BLOCK_BYTES, bytes(self.pages[page]))


def parts(offset_bytes: int, length_bytes: int) -> list[tuple[int, int, int]]:
    """The pages of a range: each one's number, and begin and end within it."""
    end = offset_bytes + length_bytes
    numbers = range(offset_bytes // BLOCK_BYTES, -(-end // BLOCK_BYTES))
    return [
        (
            page,
            max(offset_bytes - page * BLOCK_BYTES, 0),
            min(end - page * BLOCK_BYTES, BLOCK_BYTES),
        )
        for page in numbers
    ]
