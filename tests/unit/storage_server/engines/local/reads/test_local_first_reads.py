"""What the first read after a put finds in memory, and what becomes of what is not there."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.operators.engine_status import PathStatus
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.local.direct import kernel_facts
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.volumes import joined_writes
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, IoPath, Transfer
from tests.contract.engine_suite import BUCKET, content, put, read
from tests.contract.opened_engines.local_engines import small_local_engine

LAYERS, SLICE_BYTES = 4, 4 * KIB
CHUNK_BYTES = LAYERS * SLICE_BYTES
EXTENT_BYTES = 4 * CHUNK_BYTES  # the small engines' rows hold four slices
LATER_S = 1e9  # of the monotonic clock: the device has been quiet for long
BUSY_S = LATER_S + 1000

Open = Callable[..., LocalEngine]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    """Opens one store again and again, whose rounds of upkeep are run by hand."""
    engines: list[LocalEngine] = []

    def open_one(page_cache_bytes: int = 64 * MIB) -> LocalEngine:
        for engine in engines:
            engine.close()
        engines[:] = [small_local_engine(tmp_path / "data", page_cache_bytes=page_cache_bytes)]
        if IoPath.DIRECT not in engines[0].volume.paths:
            pytest.skip("the file system has no direct path")
        engines[0].upkeep.close()
        if not engines[0].buckets():
            engines[0].create_bucket(BUCKET)
        return engines[0]

    yield open_one
    for engine in engines:
        engine.close()


class WatchedVolume:
    """Notes what the volume of an engine is asked for."""

    def __init__(self, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[IoPath] = []
        self.written: list[tuple[IoPath, Transfer]] = []
        self.prefetched_bytes = self.asked = 0
        volume = engine.volume
        read, write = volume.read, volume.write
        prefetch, read_resident = volume.prefetch, volume.read_resident

        def noted_read(transfers: Sequence[Transfer], path: IoPath) -> int:
            self.reads.append(path)
            return read(transfers, path)

        def noted_write(transfers: Sequence[Transfer], path: IoPath) -> None:
            self.written += [(path, transfer) for transfer in transfers]
            write(transfers, path)

        def noted_prefetch(offset_bytes: int, length_bytes: int) -> None:
            self.prefetched_bytes += length_bytes
            prefetch(offset_bytes, length_bytes)

        def noted_read_resident(transfer: Transfer) -> bool:
            self.asked += 1
            return read_resident(transfer)

        monkeypatch.setattr(volume, "read", noted_read)
        monkeypatch.setattr(volume, "write", noted_write)
        monkeypatch.setattr(volume, "prefetch", noted_prefetch)
        monkeypatch.setattr(volume, "read_resident", noted_read_resident)

    def paths_written(self) -> set[IoPath]:
        return {path for path, _ in self.written}


def put_prefix(
    engine: LocalEngine,
    name: str,
    count: int = 8,
    *,
    layerwise: bool = False,
    slice_bytes: int = SLICE_BYTES,
) -> list[str]:
    keys = [f"{name}-{index:02}" for index in range(count)]
    prefix = engine.stage_prefix(BUCKET.name, PrefixShape(keys, LAYERS, slice_bytes, layerwise))
    chunks = [content(key, LAYERS * slice_bytes) for key in keys]
    slices = [
        chunk[layer * slice_bytes :][:slice_bytes] for layer in range(LAYERS) for chunk in chunks
    ]
    prefix.write(0, memoryview(b"".join(slices if layerwise else chunks)))
    puts = [StagedPut(staged, "") for staged in prefix.staged]
    engine.commit(puts, Condition(immutable=True))
    return keys


def assert_stored(engine: LocalEngine, keys: Sequence[str], chunk_bytes: int = CHUNK_BYTES) -> None:
    """Read a prefix as a delivery does."""
    with engine.open_many(BUCKET.name, keys, are_prefix=True) as opened:
        for index, key in enumerate(keys):
            memory = bytearray(chunk_bytes)
            opened.read_into(index, 0, memoryview(memory))
            assert memory == content(key, chunk_bytes), key


def page_cache(engine: LocalEngine) -> PathStatus:
    return next(path for path in engine.status().paths if path.name == "page_cache")


def forget(engine: LocalEngine) -> None:
    """As after a reclaim of memory."""
    for segment in engine.volume.segments():
        length_bytes = engine.volume.segment_bytes
        engine.volume.drop_cache(segment * length_bytes, length_bytes)


def bring_in(engine: LocalEngine) -> None:
    """As many rounds of upkeep as a slow machine needs to bring in what was missed."""
    for number in range(100):
        engine.upkeep.round(now_s=LATER_S + number)
        if not engine.path_use.missing_count:
            return
    raise AssertionError(f"{engine.path_use.missing_count} extents are still missing")


# --- puts ---


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("slice_bytes", [SLICE_BYTES, 1000])
def test_the_first_read_after_a_put_within_the_budget_is_all_in_memory(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, layerwise: bool, slice_bytes: int
) -> None:
    engine = open_engine()
    keys = put_prefix(engine, "new", 7, layerwise=layerwise, slice_bytes=slice_bytes)
    large = content("large", 3 * MIB + 5)
    put(engine, "large", large)
    volume = WatchedVolume(engine, monkeypatch)
    assert_stored(engine, keys, LAYERS * slice_bytes)
    assert read(engine, "large") == large
    assert volume.reads == []
    counts = page_cache(engine)
    assert counts.read_bytes == counts.hit_bytes > 7 * LAYERS * slice_bytes


@pytest.mark.parametrize("layerwise", [False, True])
def test_what_is_put_beyond_the_budget_goes_past_the_page_cache(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, layerwise: bool
) -> None:
    engine = open_engine(page_cache_bytes=EXTENT_BYTES)
    volume = WatchedVolume(engine, monkeypatch)
    put_prefix(engine, "fits", 4, layerwise=layerwise)
    assert volume.paths_written() == {IoPath.PAGE_CACHE}
    volume.written.clear()
    keys = put_prefix(engine, "beyond", 4, layerwise=layerwise)
    put(engine, "large", content("large", MIB))
    assert volume.paths_written() == {IoPath.DIRECT}
    assert_stored(engine, keys)
    assert page_cache(engine).extent_bytes == EXTENT_BYTES


def test_rows_that_end_within_a_block_are_written_with_it(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    volume = WatchedVolume(engine, monkeypatch)
    keys = put_prefix(engine, "odd", 3, layerwise=True, slice_bytes=1000)
    assert volume.paths_written() == {IoPath.PAGE_CACHE}
    for _, (offset_bytes, memory) in volume.written:
        assert offset_bytes % BLOCK_BYTES == len(memory) % BLOCK_BYTES == 0
    assert_stored(engine, keys, LAYERS * 1000)


def test_the_device_is_set_to_work_after_each_piece_that_the_page_cache_took(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []

    def start_write_back(file_descriptor: int, offset_bytes: int, length_bytes: int) -> None:
        begun.append((offset_bytes, length_bytes))

    monkeypatch.setattr(joined_writes, "start_write_back", start_write_back)
    engine = open_engine()
    put(engine, "large", content("large", 2 * MIB + 100))
    assert max(length for _, length in begun) <= joined_writes.WRITE_BACK_BYTES
    assert sum(length for _, length in begun) == 2 * MIB + 100
    begun.clear()
    put_prefix(engine, "rows", 4, layerwise=True)
    assert [length for _, length in begun] == [EXTENT_BYTES]  # its rows lie side by side


# --- what is not in memory ---


def test_after_a_restart_all_is_read_directly_and_is_in_memory_soon_after(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put_prefix(open_engine(), "kept")
    engine = open_engine()
    forget(engine)
    volume = WatchedVolume(engine, monkeypatch)
    assert_stored(engine, keys)
    assert set(volume.reads) == {IoPath.DIRECT}
    assert volume.asked == 2  # a block of each extent, once for all reads of the opening
    counts = page_cache(engine)
    assert (counts.read_bytes, counts.hit_bytes) == (8 * CHUNK_BYTES, 0)
    assert volume.prefetched_bytes == 0
    bring_in(engine)
    assert volume.prefetched_bytes == 2 * EXTENT_BYTES
    volume.reads.clear()
    assert_stored(engine, keys)
    assert volume.reads == []
    assert page_cache(engine).hit_bytes == 8 * CHUNK_BYTES
    engine.upkeep.round(now_s=LATER_S)
    assert volume.prefetched_bytes == 2 * EXTENT_BYTES  # there is nothing left to bring


def test_what_the_system_kept_over_a_restart_is_found(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put_prefix(open_engine(), "kept")
    engine = open_engine()
    volume = WatchedVolume(engine, monkeypatch)
    assert_stored(engine, keys)
    assert volume.reads == []


def test_an_extent_that_lacks_a_piece_is_not_asked_for_another(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    keys = put_prefix(engine, "reclaimed")
    assert_stored(engine, keys)
    forget(engine)
    volume = WatchedVolume(engine, monkeypatch)
    assert_stored(engine, keys)
    assert volume.asked == 2
    assert set(volume.reads) == {IoPath.DIRECT}
    bring_in(engine)
    volume.reads.clear()
    assert_stored(engine, keys)
    assert volume.reads == []


def test_nothing_is_brought_into_memory_beside_a_reader(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put_prefix(open_engine(), "kept", 16)
    engine = open_engine()
    forget(engine)
    volume = WatchedVolume(engine, monkeypatch)
    assert_stored(engine, keys)
    bring_in(engine)
    engine.upkeep.round(now_s=BUSY_S - 0.5)  # nothing is missing yet
    first_bytes = volume.prefetched_bytes
    forget(engine)
    assert_stored(engine, keys)
    with engine.path_use.fragment(1, IoPath.DIRECT):
        engine.upkeep.round(now_s=BUSY_S)
        assert volume.prefetched_bytes == first_bytes == 4 * EXTENT_BYTES
        engine.upkeep.round(now_s=BUSY_S + 2)  # they never leave: one extent now and then
        assert volume.prefetched_bytes == first_bytes + EXTENT_BYTES
        engine.upkeep.round(now_s=BUSY_S + 2.5)
        assert volume.prefetched_bytes == first_bytes + EXTENT_BYTES


def test_an_extent_that_was_deleted_is_not_brought_into_memory(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put_prefix(open_engine(), "kept")
    engine = open_engine()
    forget(engine)
    volume = WatchedVolume(engine, monkeypatch)
    assert_stored(engine, keys)
    engine.delete(BUCKET.name, keys)
    engine.upkeep.round(now_s=LATER_S)
    assert volume.prefetched_bytes == 0


def test_what_enters_the_budget_is_read_directly_until_it_was_brought_in(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = put_prefix(open_engine(page_cache_bytes=0), "direct")
    engine = open_engine(page_cache_bytes=0)
    assert_stored(engine, keys)
    numbers = [0, 1]
    engine.holdings.set_paths(numbers, IoPath.PAGE_CACHE)
    volume = WatchedVolume(engine, monkeypatch)
    assert_stored(engine, keys)
    assert set(volume.reads) == {IoPath.DIRECT}
    assert page_cache(engine).read_bytes == 8 * CHUNK_BYTES


def test_the_kernel_is_asked_for_no_more_at_once_than_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def posix_fadvise(file_descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        asked.append((offset, length))

    monkeypatch.setattr(os, "posix_fadvise", posix_fadvise)
    kernel_facts.read_ahead(-1, 96 * KIB, 300 * KIB, 128 * KIB)
    assert [offset for offset, _ in asked] == [96 * KIB, 128 * KIB, 256 * KIB, 384 * KIB]
    assert sum(length for _, length in asked) == 300 * KIB


@pytest.mark.parametrize("readers", [1, 2])
def test_readers_that_look_at_once_find_what_is_there(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    keys = put_prefix(open_engine(), "kept")
    engine = open_engine()
    volume = WatchedVolume(engine, monkeypatch)
    seems_resident = engine.path_use.seems_resident
    looking = threading.Barrier(readers, timeout=60)

    def at_once(offset_bytes: int, length_bytes: int) -> bool:
        with contextlib.suppress(threading.BrokenBarrierError):
            looking.wait()
        return seems_resident(offset_bytes, length_bytes)

    monkeypatch.setattr(engine.path_use, "seems_resident", at_once)
    with (
        engine.open_many(BUCKET.name, keys, are_prefix=True) as opened,
        ThreadPoolExecutor(readers) as pool,
    ):
        reading = [
            pool.submit(opened.read_into, 0, 0, memoryview(bytearray(CHUNK_BYTES)))
            for _ in range(readers)
        ]
        for each in reading:
            each.result()
    assert volume.reads == []
