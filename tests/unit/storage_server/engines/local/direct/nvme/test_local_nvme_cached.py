"""The NVMe volume with both paths: no stale page is ever read, no dirty one is written too late.

The block device here has a page cache that goes stale with every command, as the kernel's does.
"""

from __future__ import annotations

import errno
import itertools
import random
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from objectcache_schemas.errors import DamagedData, Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.local.direct.nvme import nvme_block
from objectcache_storage_server.engines.local.direct.nvme.nvme_block import (
    KernelBlockDevice,
    UnsuitableBlockDevice,
)
from objectcache_storage_server.engines.local.volumes.byte_ranges import ByteRanges
from objectcache_storage_server.engines.local.volumes.nvme_superblock import HEADER_BYTES
from objectcache_storage_server.engines.local.volumes.nvme_volume import NvmeVolume
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, IoPath, Transfer
from tests.contract.engine_suite import BUCKET, put, read
from tests.contract.opened_engines.local_engines import NVME_BYTES, nvme_local_engine
from tests.unit.storage_server.engines.local.emulated_block_device import EmulatedBlockDevice
from tests.unit.storage_server.engines.local.emulated_nvme import FLUSH, WRITE, EmulatedNvme
from tests.unit.storage_server.engines.local.volumes.volume_model import Disagreement, run_model

SEGMENT_BYTES = 1 * MIB
SMALL_BYTES = 2 * MIB  # one segment behind the superblock


class Pair:
    """A volume, and both devices behind it."""

    def __init__(self, folder: Path, capacity_bytes: int = 8 * MIB, lba_bytes: int = 512) -> None:
        self.device = EmulatedNvme(capacity_bytes, lba_bytes=lba_bytes)
        self.block_device = EmulatedBlockDevice(self.device)
        self.volume = NvmeVolume(self.device, folder, SEGMENT_BYTES, self.block_device)

    def write(self, offset_bytes: int, data: bytes, path: IoPath) -> None:
        self.volume.write([Transfer(offset_bytes, memoryview(data))], path)

    def read(self, offset_bytes: int, length_bytes: int, path: IoPath) -> bytes:
        data = bytearray(length_bytes)
        self.volume.read([Transfer(offset_bytes, memoryview(data))], path)
        return bytes(data)

    def is_resident(self, offset_bytes: int, length_bytes: int) -> bool:
        return self.volume.read_resident(
            Transfer(offset_bytes, memoryview(bytearray(length_bytes)))
        )


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def noise(length_bytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(length_bytes)


OLD, NEW = noise(64 * KIB, 1), noise(64 * KIB, 2)


# --- stale pages ---


def test_both_paths_are_there_and_said(pair: Pair) -> None:
    assert pair.volume.paths == frozenset(IoPath)
    assert pair.volume.cache_path == "emulated block device"


def test_what_is_written_through_the_cache_is_in_memory_at_once(pair: Pair) -> None:
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    assert pair.is_resident(0, len(OLD))
    assert pair.read(0, len(OLD), IoPath.PAGE_CACHE) == OLD


def test_a_page_from_before_a_direct_write_is_not_read(pair: Pair) -> None:
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    pair.write(0, NEW, IoPath.DIRECT)
    assert pair.block_device.pages[HEADER_BYTES // BLOCK_BYTES] == OLD[:BLOCK_BYTES]
    assert not pair.is_resident(0, len(NEW))
    assert pair.read(0, len(NEW), IoPath.PAGE_CACHE) == NEW


def test_a_page_that_somebody_else_has_read_is_dropped_before_the_range_enters(pair: Pair) -> None:
    pair.block_device.prefetch(HEADER_BYTES, len(NEW))
    pair.write(0, NEW, IoPath.DIRECT)
    assert pair.volume.enter_cache(0, len(NEW))
    assert pair.read(0, len(NEW), IoPath.PAGE_CACHE) == NEW
    assert pair.is_resident(0, len(NEW))


def test_a_range_with_a_page_that_cannot_be_dropped_stays_direct(pair: Pair) -> None:
    page = HEADER_BYTES // BLOCK_BYTES + 3
    pair.block_device.prefetch(HEADER_BYTES, len(NEW))
    pair.block_device.mapped.add(page)
    pair.write(0, NEW, IoPath.DIRECT)
    assert not pair.volume.enter_cache(0, len(NEW))
    pair.volume.prefetch(0, len(NEW))
    assert not pair.is_resident(0, len(NEW))
    assert pair.read(0, len(NEW), IoPath.PAGE_CACHE) == NEW
    pair.block_device.mapped.clear()
    assert pair.volume.enter_cache(0, len(NEW))
    assert pair.read(0, len(NEW), IoPath.PAGE_CACHE) == NEW


def test_what_is_missed_is_prefetched_once_it_is_certain_to_be_no_older(pair: Pair) -> None:
    pair.block_device.prefetch(HEADER_BYTES, len(NEW))
    pair.write(0, NEW, IoPath.DIRECT)
    pair.volume.prefetch(1000, 20_000)
    assert pair.is_resident(0, 20 * KIB)
    assert not pair.is_resident(0, 64 * KIB)
    assert pair.read(0, len(NEW), IoPath.PAGE_CACHE) == NEW


def test_a_range_that_is_written_to_while_it_enters_is_not_fresh(pair: Pair) -> None:
    drop = pair.block_device.drop

    def drop_then_read_ahead(offset_bytes: int, length_bytes: int) -> bool:
        is_gone = drop(offset_bytes, length_bytes)
        pair.block_device.prefetch(offset_bytes, length_bytes)
        pair.write(0, NEW, IoPath.DIRECT)
        return is_gone

    pair.write(0, OLD, IoPath.DIRECT)
    pair.block_device.drop = drop_then_read_ahead  # type: ignore[method-assign]
    assert not pair.volume.enter_cache(0, len(NEW))
    assert pair.read(0, len(NEW), IoPath.PAGE_CACHE) == NEW


def test_a_range_that_enters_while_it_is_written_to_is_not_fresh(pair: Pair) -> None:
    pair.write(0, OLD, IoPath.DIRECT)

    def enter_before(opcode: int, start: int, count: int) -> int:
        if opcode == WRITE:
            pair.volume.enter_cache(0, len(NEW))
            pair.block_device.prefetch(HEADER_BYTES, len(NEW))
        return 0

    pair.device.faults = enter_before
    pair.write(0, NEW, IoPath.DIRECT)
    assert pair.read(0, len(NEW), IoPath.PAGE_CACHE) == NEW


def test_what_was_discarded_is_not_read_from_memory(pair: Pair) -> None:
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    pair.volume.discard(0, len(OLD))
    assert not pair.is_resident(0, BLOCK_BYTES)


def test_nothing_is_fresh_when_a_volume_is_opened(pair: Pair, tmp_path: Path) -> None:
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    pair.volume.flush([(0, len(OLD))])
    pair.device.change(HEADER_BYTES, NEW)
    again = NvmeVolume(pair.device, tmp_path, SEGMENT_BYTES, pair.block_device)
    data = bytearray(len(NEW))
    again.read([Transfer(0, memoryview(data))], IoPath.PAGE_CACHE)
    assert data == NEW


# --- dirty pages ---


def test_the_direct_path_reads_what_is_only_in_the_cache_yet(pair: Pair) -> None:
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    assert pair.block_device.dirty
    assert pair.read(5, 1000, IoPath.DIRECT) == OLD[5:1005]


@pytest.mark.parametrize("through", ["write", "discard"])
def test_a_dirty_page_is_not_written_over_what_comes_later(pair: Pair, through: str) -> None:
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    if through == "discard":
        pair.volume.discard(0, len(OLD))
        assert not pair.block_device.dirty
    pair.write(0, NEW, IoPath.DIRECT)
    pair.block_device.write_back(0, len(pair.device.blocks))
    assert pair.read(0, len(NEW), IoPath.DIRECT) == NEW


def test_what_a_killed_process_left_dirty_is_written_when_the_volume_is_opened(
    pair: Pair, tmp_path: Path
) -> None:
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    again = NvmeVolume(pair.device, tmp_path, SEGMENT_BYTES, pair.block_device)
    again.write([Transfer(0, memoryview(NEW))], IoPath.DIRECT)
    pair.block_device.write_back(0, len(pair.device.blocks))
    assert pair.read(0, len(NEW), IoPath.DIRECT) == NEW


@pytest.mark.parametrize(
    ("begin", "length"),
    [(0, 1), (1, BLOCK_BYTES), (BLOCK_BYTES - 1, 3 * BLOCK_BYTES + 7), (BLOCK_BYTES, BLOCK_BYTES)],
)
def test_a_piece_of_a_page_keeps_what_the_device_has_of_the_rest(
    pair: Pair, begin: int, length: int
) -> None:
    pair.block_device.prefetch(HEADER_BYTES, len(OLD))  # zeros
    pair.write(0, OLD, IoPath.DIRECT)
    pair.write(begin, NEW[:length], IoPath.PAGE_CACHE)
    expected = OLD[:begin] + NEW[:length] + OLD[begin + length :]
    assert pair.read(0, len(OLD), IoPath.PAGE_CACHE) == expected
    assert pair.read(0, len(OLD), IoPath.DIRECT) == expected


# --- durability ---


@pytest.mark.parametrize("seed", range(3))
def test_what_was_flushed_survives_a_power_loss_by_either_path(pair: Pair, seed: int) -> None:
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    pair.write(64 * KIB, NEW, IoPath.DIRECT)
    pair.volume.flush([(0, 128 * KIB)])
    pair.write(256 * KIB, NEW, IoPath.DIRECT)
    pair.block_device.pages.clear()
    pair.block_device.dirty.clear()
    pair.device.lose_power(seed)
    assert pair.read(0, 128 * KIB, IoPath.DIRECT) == OLD + NEW
    assert pair.read(256 * KIB, 64 * KIB, IoPath.DIRECT) != NEW


def test_a_flush_asks_those_devices_that_were_written_through(pair: Pair) -> None:
    def flushes(*ranges: tuple[int, int]) -> tuple[int, int]:
        pair.device.executed.clear()
        pair.block_device.flushes = 0
        pair.volume.flush(ranges)
        commands = [opcode for opcode, _, _ in pair.device.executed]
        return pair.block_device.flushes, commands.count(FLUSH)

    pair.write(0, OLD, IoPath.PAGE_CACHE)
    pair.write(64 * KIB, NEW, IoPath.DIRECT)
    assert flushes((64 * KIB, 64 * KIB)) == (0, 1)
    assert flushes((0, 64 * KIB)) == (1, 0)
    assert flushes((0, 64 * KIB)) == (0, 1)
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    assert flushes((0, 128 * KIB)) == (1, 1)


def test_what_a_failed_flush_was_to_make_durable_is_flushed_again(pair: Pair) -> None:
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    pair.block_device.failing_flushes = 1
    with pytest.raises(OSError, match="Input/output"):
        pair.volume.flush([(0, len(OLD))])
    pair.volume.flush([(0, len(OLD))])
    assert pair.block_device.flushes == 2


def test_a_flush_that_ends_before_a_write_does_not_count_for_it(pair: Pair) -> None:
    write = pair.block_device.write

    def flush_before(offset_bytes: int, memory: memoryview) -> None:
        pair.volume.flush([(0, len(OLD))])
        write(offset_bytes, memory)

    pair.block_device.write = flush_before  # type: ignore[method-assign]
    pair.write(0, OLD, IoPath.PAGE_CACHE)
    pair.volume.flush([(0, len(OLD))])
    assert pair.block_device.flushes == 2
    assert not pair.block_device.dirty


def test_another_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="holds another superblock"):
        NvmeVolume(EmulatedNvme(), tmp_path, SEGMENT_BYTES, EmulatedBlockDevice(EmulatedNvme()))


def test_without_a_block_device_the_direct_path_is_alone(tmp_path: Path) -> None:
    volume = NvmeVolume(EmulatedNvme(), tmp_path, SEGMENT_BYTES, None, "it cannot be opened")
    assert volume.paths == {IoPath.DIRECT}
    assert volume.cache_path == "none: it cannot be opened"
    assert not volume.enter_cache(0, BLOCK_BYTES)
    volume.prefetch(0, BLOCK_BYTES)


def test_a_range_outside_of_the_volume_is_an_io_error_on_either_path(pair: Pair) -> None:
    for path in IoPath:
        with pytest.raises(OSError, match="not in the volume") as caught:
            pair.read(7 * MIB - 1, 2, path)
        assert caught.value.errno == errno.EIO


def test_a_device_of_another_kind_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_block, "generic_name", lambda path: "ng7n1")
    file = tmp_path / "disk"
    file.write_bytes(b"precious")
    for path in (file, Path("/dev/null")):
        with pytest.raises(
            UnsuitableBlockDevice, match=r"is no block device; that of /dev/ng7n1 is nvme7n1"
        ):
            KernelBlockDevice(path, Path("/dev/ng7n1"))
    with pytest.raises(UnsuitableBlockDevice, match=r"missing cannot be opened: No such file"):
        KernelBlockDevice(tmp_path / "missing", Path("/dev/ng7n1"))
    assert file.read_bytes() == b"precious"


# --- the engine over both ---


def test_a_stale_page_drops_the_page_and_not_the_object(tmp_path: Path) -> None:
    """What no rule of the volume knows of: somebody wrote into the page cache."""
    device = EmulatedNvme(NVME_BYTES)
    block_device = EmulatedBlockDevice(device)
    with closing(
        nvme_local_engine(tmp_path, device, block_device, page_cache_bytes=16 * MIB)
    ) as engine:
        engine.create_bucket(BUCKET)
        put(engine, "key", OLD)
        assert read(engine, "key") == OLD
        engine.upkeep.round()
        for page in block_device.pages.values():
            page[100:104] = b"rot!"
        hits_before = engine.path_use.counts[IoPath.PAGE_CACHE].hit_bytes
        assert read(engine, "key") == OLD
        assert engine.path_use.counts[IoPath.PAGE_CACHE].hit_bytes > hits_before
        status = engine.status()
        assert (status.damaged, status.stale_reads) == (0, 1)
        assert read(engine, "key") == OLD
        assert engine.status().stale_reads == 1


@pytest.mark.parametrize("page_cache_bytes", [16 * MIB, 0])
def test_rot_on_the_device_is_found_by_either_path(tmp_path: Path, page_cache_bytes: int) -> None:
    device = EmulatedNvme(NVME_BYTES)
    block_device = EmulatedBlockDevice(device)
    with closing(
        nvme_local_engine(tmp_path, device, block_device, page_cache_bytes=page_cache_bytes)
    ) as engine:
        engine.create_bucket(BUCKET)
        put(engine, "key", OLD)
        device.change(device.blocks.find(OLD[:64]), b"rot!")
        block_device.pages.clear()
        with pytest.raises(DamagedData):
            read(engine, "key")
        assert (engine.status().damaged, engine.status().stale_reads) == (1, 0)


def test_the_planner_leaves_direct_what_cannot_enter_the_cache(tmp_path: Path) -> None:
    device = EmulatedNvme(NVME_BYTES)
    block_device = EmulatedBlockDevice(device)
    with closing(nvme_local_engine(tmp_path, device, block_device, page_cache_bytes=0)) as engine:
        engine.create_bucket(BUCKET)
        for name in ("one", "two"):
            put(engine, name, noise(64 * KIB, seed=len(name) + ord(name[0])))
            read(engine, name)
        engine.upkeep.close()  # its own rounds would find the range before it is mapped
        settings = msgspec.structs.replace(engine.settings, page_cache_bytes=16 * MIB)
        engine.upkeep.settings = settings
        begin = device.blocks.find(noise(64 * KIB, seed=3 + ord("t"))[:64])
        block_device.prefetch(begin, BLOCK_BYTES)
        block_device.mapped.add(begin // BLOCK_BYTES)
        engine.upkeep.round(time.monotonic() + 10)
        extents = {path.name: path.extents for path in engine.status().paths}
        assert extents == {"page_cache": 1, "direct": 1}
        block_device.mapped.clear()
        engine.upkeep.round(time.monotonic() + 20)
        extents = {path.name: path.extents for path in engine.status().paths}
        assert extents == {"page_cache": 2, "direct": 0}


# --- anything, in any order ---


@pytest.mark.parametrize("lba_bytes", [512, 4096])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_paths_agrees_with_plain_memory(
    tmp_path: Path, seed: int, lba_bytes: int
) -> None:
    pair = Pair(tmp_path, capacity_bytes=SMALL_BYTES, lba_bytes=lba_bytes)
    run_model(pair.volume, seed, steps=400, stir=pair.block_device.stir)
    assert pair.volume.room_bytes() == 0


def test_without_invalidation_the_model_finds_stale_pages(tmp_path: Path) -> None:
    """The model can fail: here the page cache keeps what it says it dropped."""
    pair = Pair(tmp_path, capacity_bytes=SMALL_BYTES)
    pair.block_device.drops_nothing = True
    with pytest.raises(Disagreement):
        run_model(pair.volume, seed=1, steps=2000, stir=pair.block_device.stir)


# --- sets of bytes ---


@pytest.mark.parametrize("seed", range(20))
def test_byte_ranges_agree_with_a_set_of_numbers(seed: int) -> None:
    chance = random.Random(seed)
    ranges, numbers = ByteRanges(), set[int]()
    for _ in range(60):
        begin, end = sorted((chance.randrange(60), chance.randrange(60)))
        if chance.random() < 0.6:
            ranges.add(begin, end)
            numbers |= set(range(begin, end))
        else:
            ranges.remove(begin, end)
            numbers -= set(range(begin, end))
        found = list(ranges)
        assert {number for first, last in found for number in range(first, last)} == numbers
        assert all(one[1] < other[0] for one, other in itertools.pairwise(found))
        begin, end = sorted((chance.randrange(60), chance.randrange(60)))
        wanted = set(range(begin, end))
        assert ranges.covers(begin, end) == (wanted <= numbers)
        assert ranges.overlaps(begin, end) == bool(wanted & numbers)
        missing = {n for first, last in ranges.missing(begin, end) for n in range(first, last)}
        assert missing == wanted - numbers
