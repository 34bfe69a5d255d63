"""A volume in a raw NVMe namespace, which the store owns whole.

The direct path passes commands through to the namespace's character device. The page-cache path is
its block device, where there is one that can be used; both have the same addresses, and
`cached_namespace.py` keeps what one has written from being hidden from the other.

The first `HEADER_BYTES` hold the superblock (`nvme_superblock.py`); the volume's address 0 is what
follows. Segments are all there from the start, the length of the namespace being fixed; one that
was removed can be added again, and is there again when the volume is next opened.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from objectcache_schemas.errors import Unavailable
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.local.direct.alignment import PAGE_ALIGNMENT
from objectcache_storage_server.engines.local.direct.batches import (
    Bounce,
    ReadBatch,
    WriteBatch,
    address_of,
)
from objectcache_storage_server.engines.local.direct.block_device import BlockDevice
from objectcache_storage_server.engines.local.direct.nvme.nvme_block import (
    KernelBlockDevice,
    UnsuitableBlockDevice,
    check_names,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_commands import (
    DEALLOCATE_RANGE_BYTES,
    LbaRange,
    deallocate_command,
    deallocate_lists,
    flush_command,
    lba_range,
)
from objectcache_storage_server.engines.local.direct.nvme.nvme_device import NvmeDevice
from objectcache_storage_server.engines.local.direct.nvme.nvme_kernel import KernelNvmeDevice
from objectcache_storage_server.engines.local.direct.nvme.nvme_submitter import NvmeSubmitter
from objectcache_storage_server.engines.local.volumes.cached_namespace import CachedNamespace
from objectcache_storage_server.engines.local.volumes.nvme_store_id import StoreId
from objectcache_storage_server.engines.local.volumes.nvme_superblock import (
    HEADER_BYTES,
    MARGIN_BYTES,
    SUPERBLOCK_BYTES,
    Claim,
    RefusedNamespace,
    Superblock,
    judge,
)
from objectcache_storage_server.engines.local.volumes.volume import (
    BLOCK_BYTES,
    IoPath,
    Transfer,
    Volume,
)

PIECE_BYTES_MAX = 1 * MIB  # of what goes through the bounce buffer at once
AUTO, OFF = "auto", "off"  # of storage.nvme_block_device
_NO_FILE = -1  # pieces name a range of the namespace alone

log = logging.getLogger("objectcache.storage_server.engines.local.volumes.nvme_volume")


def open_nvme_volume(
    device_path: Path,
    folder: Path,
    segment_bytes: int,
    depth: int,
    block_device: str = "auto",
) -> NvmeVolume:
    """The volume in the namespace `device_path` (/dev/ng0n1); `folder` is the store's index folder.

    `block_device` is the same namespace's (/dev/nvme0n1); auto finds it, and does without it where
    it cannot be used; off does without it.

    Raises `Unavailable`, with a remedy, where it cannot be used or is not this store's.
    """
    named = None if block_device in (AUTO, OFF) else Path(block_device)
    if named is not None:
        _refuse_other(named, device_path)
    with contextlib.ExitStack() as undo:
        device = KernelNvmeDevice(device_path, depth, named)
        undo.callback(device.close)
        why_none = "storage.nvme_block_device is off"
        pages: BlockDevice | None = None
        if block_device != OFF:
            try:
                pages = KernelBlockDevice(device.block_path, device_path)
                undo.callback(pages.close)
            except UnsuitableBlockDevice as error:
                why_none = str(error)
                if named is not None:
                    raise Unavailable(f"storage.nvme_block_device: {error}") from error
                log.warning("extents of %s are read directly alone: %s", device_path, error)
        volume = NvmeVolume(device, folder, segment_bytes, pages, why_none)
        undo.pop_all()
        return volume


def _refuse_other(named: Path, device_path: Path) -> None:
    """Raise `Unavailable` for what is not the block device, before anybody claims it."""
    try:
        check_names(named, device_path)
    except UnsuitableBlockDevice as error:
        raise Unavailable(f"storage.nvme_block_device: {error}") from error
    except OSError:
        return  # which of the two it is, and why, is said when it is opened


class NvmeVolume(Volume):
    """Segments one after the other, behind the superblock."""

    gives_segments_back = False  # the namespace is the store's alone

    def __init__(
        self,
        device: NvmeDevice,
        folder: Path,
        segment_bytes: int,
        block_device: BlockDevice | None = None,
        why_none: str = "no block device was given",
    ) -> None:
        """Open the namespace, or format one that is blank and the store's first.

        `segment_bytes` counts when it is formatted; after that, what the superblock says.
        `block_device` is the same namespace's; where there is none, `why_none` is for operators.
        The volume closes both, except where the constructor raises. Raises `Unavailable`.
        """
        assert segment_bytes > 0
        assert segment_bytes % BLOCK_BYTES == 0
        self.paths = frozenset({IoPath.DIRECT})
        self.cache_path = f"none: {why_none}"
        self._cached: CachedNamespace | None = None
        self._block_device = block_device
        self._filling = threading.Lock()  # of pages that a write covers in part
        self._device = device
        self._submitter = NvmeSubmitter(device)
        self.device_path = self._submitter.description
        self._local = threading.local()  # bounce buffers
        self._changing = threading.Lock()  # of the set of segments
        self._is_closed = False
        try:
            superblock = self._claim(StoreId(folder), segment_bytes)
            if block_device is not None:
                self._cached = self._checked_cache(block_device)
                self.paths = frozenset(IoPath)
                self.cache_path = block_device.description
        except (RefusedNamespace, ValueError) as error:
            raise Unavailable(f"{device.name} is not used: {error}") from error
        except OSError as error:
            raise Unavailable(f"{device.name} cannot be opened: {error}") from error
        self.segment_bytes = superblock.segment_bytes
        self._segment_count = _segment_count(superblock.capacity_bytes, self.segment_bytes)
        self._segments = set(range(self._segment_count))

    def __repr__(self) -> str:
        return (
            f"<NvmeVolume {len(self._segments)} of {self.segment_bytes} bytes, "
            f"direct path: {self.device_path}, page cache: {self._cached}>"
        )

    # --- space ---

    def segments(self) -> Sequence[int]:
        return sorted(self._segments)

    def extend(self) -> int:
        with self._changing:
            self._check_open()
            for segment in range(self._segment_count):
                if segment not in self._segments:
                    self._segments.add(segment)
                    return segment
        raise OSError(errno.ENOSPC, "the namespace has no more segments")

    def remove(self, segment: int) -> None:
        with self._changing:
            self._check_open()
            self._segments.remove(segment)
            self.discard(segment * self.segment_bytes, self.segment_bytes)

    def room_bytes(self) -> int:
        return (self._segment_count - len(self._segments)) * self.segment_bytes

    # --- bytes ---

    def read(self, transfers: Sequence[Transfer], path: IoPath) -> int:
        found_bytes = 0
        direct: list[tuple[int, memoryview]] = []
        for offset_bytes, memory in transfers:
            # The controller writes to the address: nobody else would notice.
            assert not memory.readonly
            if not len(memory):
                continue
            located = self._located(offset_bytes, len(memory))
            if path is IoPath.PAGE_CACHE and self._cache.is_fresh(located, located + len(memory)):
                found_bytes += self._cache.read(located, memory)
            else:
                direct.append((located, memory))
        self._read_directly(direct)
        return found_bytes

    def read_resident(self, transfer: Transfer) -> bool:
        if self._cached is None:
            return False
        offset_bytes, memory = transfer
        return self._cached.read_resident(self._located(offset_bytes, len(memory)), memory)

    def enter_cache(self, offset_bytes: int, length_bytes: int) -> bool:
        if self._cached is None:
            return False
        located = self._located(offset_bytes, length_bytes)
        return self._cached.enter(located, located + length_bytes)

    def prefetch(self, offset_bytes: int, length_bytes: int) -> None:
        if self._cached is not None:
            begin, length = PAGE_ALIGNMENT.covering(offset_bytes, length_bytes)
            located = self._located(begin, length)
            self._cached.prefetch(located, located + length)

    def write(self, transfers: Sequence[Transfer], path: IoPath) -> None:
        located = [
            (self._located(offset_bytes, len(memory)), memory)
            for offset_bytes, memory in transfers
            if len(memory)
        ]
        if path is IoPath.PAGE_CACHE:
            for begin, memory in located:
                self._write_cached(begin, memory)
            return
        batch = WriteBatch(self._submitter, self._submitter.alignment, *self._bounce())
        for begin, memory in located:
            batch.add(_NO_FILE, begin, memory)
        if self._cached is None:
            batch.run()
            return
        blocks = [PAGE_ALIGNMENT.covering(begin, len(memory)) for begin, memory in located]
        with self._cached.passed_by([(begin, begin + length) for begin, length in blocks]):
            batch.run()

    def flush(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Of the whole namespace; nothing where the controller has no volatile write cache."""
        self._check_open()
        if not ranges:
            return
        located = [
            (HEADER_BYTES + begin, HEADER_BYTES + begin + length) for begin, length in ranges
        ]
        if self._cached is not None and self._cached.flush(located):
            return
        if self._device.controller.has_write_cache:
            self._device.run([flush_command(self._device.namespace.nsid)], "NVMe flush")

    def drop_cache(self, offset_bytes: int, length_bytes: int) -> None:
        if self._cached is not None:
            located = self._located(offset_bytes, length_bytes)
            self._cached.leave(located, located + length_bytes)

    def discard(self, offset_bytes: int, length_bytes: int) -> None:
        """Deallocate the whole blocks of the range."""
        begin = -(-offset_bytes // BLOCK_BYTES) * BLOCK_BYTES
        end = (offset_bytes + length_bytes) // BLOCK_BYTES * BLOCK_BYTES
        if begin >= end or self._is_closed:
            return
        located = self._located(begin, end - begin)
        if self._cached is not None:
            self._cached.discard(located, located + end - begin)
        if not self._device.controller.has_deallocate:
            return
        lba_bytes = self._device.namespace.lba_bytes
        try:
            self._deallocate(lba_range(located, end - begin, lba_bytes))
        except OSError as error:  # a hint: what is not deallocated can be written all the same
            log.warning("%d bytes at %d were not deallocated: %s", end - begin, begin, error)

    def close(self) -> None:
        self._is_closed = True
        self._local = threading.local()
        if self._block_device is not None:
            self._block_device.close()
        self._device.close()

    @property
    def _cache(self) -> CachedNamespace:
        assert self._cached is not None, "this volume has no page cache"
        return self._cached

    def _read_directly(self, located: Sequence[tuple[int, memoryview]]) -> None:
        batch = ReadBatch(self._submitter, self._submitter.alignment, *self._bounce())
        for begin, memory in located:
            batch.add(_NO_FILE, begin, memory)
        if self._cached is not None:
            self._cached.before_direct_read(
                [(begin, begin + len(memory)) for begin, memory in located]
            )
        batch.run()

    def _write_cached(self, begin: int, memory: memoryview) -> None:
        """Whole pages as they are. Of a page that it covers in part and that may be old in the
        cache, the rest comes from the device.
        """
        first, length = PAGE_ALIGNMENT.covering(begin, len(memory))
        if (first, length) == (begin, len(memory)):
            self._cache.write(begin, memory)
            return
        with self._filling:
            for page in sorted({first, first + length - BLOCK_BYTES}):
                if not self._cache.is_fresh(page, page + BLOCK_BYTES):
                    self._fill_page(page, begin, memory)
            self._cache.write(begin, memory)

    def _fill_page(self, page: int, begin: int, memory: memoryview) -> None:
        """Write a page whole that `memory`, at `begin`, covers in part."""
        low, high = max(page, begin), min(page + BLOCK_BYTES, begin + len(memory))
        block = memoryview(bytearray(BLOCK_BYTES))
        self._read_directly([(page, block)])
        block[low - page : high - page] = memory[low - begin : high - begin]
        self._cache.write(page, block)

    def _located(self, offset_bytes: int, length_bytes: int) -> int:
        """Where a range of the volume begins in the namespace."""
        self._check_open()
        end = offset_bytes + length_bytes
        if offset_bytes < 0 or end > self._segment_count * self.segment_bytes:
            raise OSError(
                errno.EIO, f"{length_bytes} bytes at {offset_bytes} are not in the volume"
            )
        return HEADER_BYTES + offset_bytes

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "the volume is closed")

    def _bounce(self) -> tuple[Bounce, int]:
        bounce: Bounce | None = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = Bounce()
        bounce.used_bytes = 0
        return bounce, PIECE_BYTES_MAX

    def _deallocate(self, lbas: LbaRange) -> None:
        limits = self._device.deallocate_limits
        nsid = self._device.namespace.nsid
        lists = [
            memoryview(bytearray(each))
            for each in deallocate_lists(
                lbas, limits.range_lbas_max, limits.ranges_max, limits.lbas_max
            )
        ]
        commands = [
            deallocate_command(nsid, len(each) // DEALLOCATE_RANGE_BYTES, address_of(each))
            for each in lists
        ]
        self._device.run(commands, "NVMe deallocate")

    # --- the superblock ---

    def _claim(self, store_id: StoreId, segment_bytes: int) -> Superblock:
        """Find or make this store's superblock; raises `RefusedNamespace`, `OSError`."""
        capacity_bytes = self._device.namespace.capacity_bytes
        if capacity_bytes < HEADER_BYTES + MARGIN_BYTES:
            raise RefusedNamespace(f"it has only {capacity_bytes} bytes")
        begin = self._read_namespace(0, MARGIN_BYTES)
        end = self._read_namespace(capacity_bytes - MARGIN_BYTES, MARGIN_BYTES)
        found = Superblock.from_bytes(begin)
        claim = judge(
            found,
            is_blank=not any(begin) and not any(end),
            own_id=store_id.value,
            is_formatted=store_id.is_finished,
            capacity_bytes=capacity_bytes,
        )
        if found is None or claim is Claim.FORMAT:
            found = self._format(store_id, segment_bytes, capacity_bytes)
        elif not store_id.is_finished:  # it was written, and nobody knows whether it was flushed
            self._write_superblock(found)
        store_id.finish()
        return found

    def _format(self, store_id: StoreId, segment_bytes: int, capacity_bytes: int) -> Superblock:
        if not _segment_count(capacity_bytes, segment_bytes):
            raise RefusedNamespace(
                f"it has {capacity_bytes} bytes, less than a segment; lower storage.data_file_bytes"
            )
        superblock = Superblock(store_id.begin(), segment_bytes, capacity_bytes)
        log.info("formatting %s", self._device.name)
        self._write_superblock(superblock)
        return superblock

    def _write_superblock(self, superblock: Superblock) -> None:
        """Durably; raises `OSError`."""
        batch = WriteBatch(self._submitter, self._submitter.alignment, *self._bounce())
        batch.add(_NO_FILE, 0, memoryview(superblock.to_bytes()))
        batch.run()
        self.flush([(0, SUPERBLOCK_BYTES)])

    def _checked_cache(self, block_device: BlockDevice) -> CachedNamespace:
        """Raises `RefusedNamespace` where the block device is another's, `OSError`."""
        begin = self._read_namespace(0, SUPERBLOCK_BYTES)
        if block_device.read_past_cache(0, SUPERBLOCK_BYTES) != begin:
            raise RefusedNamespace(f"{block_device.name} holds another superblock")
        return CachedNamespace(block_device, self._device.namespace.capacity_bytes)

    def _read_namespace(self, offset_bytes: int, length_bytes: int) -> bytes:
        data = bytearray(length_bytes)
        batch = ReadBatch(self._submitter, self._submitter.alignment, *self._bounce())
        batch.add(_NO_FILE, offset_bytes, memoryview(data))
        batch.run()
        return bytes(data)


def _segment_count(capacity_bytes: int, segment_bytes: int) -> int:
    return (capacity_bytes - HEADER_BYTES) // segment_bytes
