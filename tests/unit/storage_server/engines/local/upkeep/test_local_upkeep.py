"""Upkeep where something fails, and that no read waits for what the volume does to its space."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from objectcache_schemas.errors import StorageFull
from objectcache_schemas.limits import MIB
from objectcache_schemas.records import BucketInfo, BucketPolicy, Condition, Durability
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.space.holdings import Holdings
from objectcache_storage_server.engines.local.upkeep import upkeep_thread
from objectcache_storage_server.engines.local.volumes.data_files import DataFiles
from objectcache_storage_server.engines.local.volumes.nvme_volume import NvmeVolume
from objectcache_storage_server.engines.local.volumes.volume import IoPath
from tests.contract.engine_suite import BUCKET, LAYOUT, content, put, read
from tests.contract.opened_engines.local_engines import nvme_local_engine, small_local_engine
from tests.unit.storage_server.engines.local.emulated_nvme import (
    CAPACITY_EXCEEDED,
    DATASET_MANAGEMENT,
    EmulatedNvme,
)

SEGMENT_BYTES = 1 * MIB
CHUNK_BYTES = LAYOUT.chunk_bytes
FIRST_S = 1e9  # of the monotonic clock, behind all rounds of the engine itself

Open = Callable[..., LocalEngine]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    """Opens one store, whose rounds are run by hand."""
    engines: list[LocalEngine] = []

    def open_one(**changes: object) -> LocalEngine:
        engine = small_local_engine(tmp_path / "data", **changes)  # type: ignore[arg-type]
        engines.append(engine)
        engine.upkeep.close()
        engine.create_bucket(BUCKET)
        return engine

    yield open_one
    for engine in engines:
        engine.close()


@pytest.fixture
def holdings(tmp_path: Path) -> Iterator[Holdings]:
    """Of empty data files."""
    volume = DataFiles(tmp_path / "data", SEGMENT_BYTES, 4 * SEGMENT_BYTES, 0, "threads")
    opened = Holdings(volume, FlushLatch())
    opened.load()
    yield opened
    volume.close()


def keys_of(name: str, count: int) -> list[str]:
    return [f"{name}-{index:03}" for index in range(count)]


def put_chunks(engine: LocalEngine, keys: Sequence[str]) -> None:
    """Chunks of one put."""
    shape = PrefixShape(keys, LAYOUT.num_layers, CHUNK_BYTES // LAYOUT.num_layers, layerwise=False)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    prefix.write(0, memoryview(b"".join(content(key, CHUNK_BYTES) for key in keys)))
    engine.commit([StagedPut(staged, "") for staged in prefix.staged], Condition(immutable=True))


def take(holdings: Holdings, length_bytes: int) -> int:
    number = holdings.allocate(length_bytes, IoPath.DIRECT, None)
    assert number is not None
    return number


# --- space ---


def test_extents_whose_deallocation_fails_are_free_once(tmp_path: Path) -> None:
    device = EmulatedNvme(33 * MIB)
    engine = nvme_local_engine(tmp_path / "data", device)
    engine.create_bucket(BUCKET)
    device.faults = lambda opcode, *_: CAPACITY_EXCEEDED if opcode == DATASET_MANAGEMENT else 0
    for key in "abc":
        put(engine, key, content(key, 8192))
    assert engine.delete(BUCKET.name, ["a", "b"]) == 2
    for key in "defg":
        put(engine, key, content(key, 8192))
    for key in "cdefg":
        assert read(engine, key) == content(key, 8192)
    assert engine.delete(BUCKET.name, list("cdefg")) == 5
    assert engine.holdings.allocated_bytes == 0
    engine.close()


def test_an_extent_is_free_once_whatever_its_discard_raises(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(offset_bytes: int, length_bytes: int) -> None:
        raise OSError(errno.EIO, "no")

    numbers = [take(holdings, 8192) for _ in range(3)]
    monkeypatch.setattr(holdings.volume, "discard", failing)
    for number in numbers[:2]:
        with pytest.raises(OSError, match="no"):
            holdings.end_writing(number, keep=False)
    with holdings.looking_up():
        pass  # which would release what waits
    assert holdings.allocated_bytes == 8192
    assert holdings.allocator.free_bytes == SEGMENT_BYTES - 8192


@pytest.mark.parametrize("method", ["extend", "remove", "discard"])
def test_nobody_waits_for_the_volume_behind_the_lock(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    carry_out = getattr(holdings.volume, method)
    was_locked: list[bool] = []

    def watched(*arguments: int) -> object:
        was_locked.append(holdings.lock.locked())
        return carry_out(*arguments)

    monkeypatch.setattr(holdings.volume, method, watched)
    number = take(holdings, 8192)
    with holdings.looking_up():
        holdings.end_writing(number, keep=False)
    holdings.return_free_segments(0)
    assert was_locked == [False]
    assert list(holdings.volume.segments()) == []


def test_two_writers_without_room_add_one_segment(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    extend = holdings.volume.extend
    other = threading.Thread(target=lambda: take(holdings, 8192))

    def crowded() -> int:
        if other.ident is None:
            other.start()
        return extend()

    monkeypatch.setattr(holdings.volume, "extend", crowded)
    take(holdings, 8192)
    other.join()
    assert list(holdings.volume.segments()) == [0]
    assert holdings.allocated_bytes == 2 * 8192


def test_a_segment_that_cannot_be_given_back_stays_in_use(
    holdings: Holdings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(segment: int) -> None:
        raise OSError(errno.EIO, "no")

    holdings.end_writing(take(holdings, 8192), keep=False)
    with monkeypatch.context() as patched:
        patched.setattr(holdings.volume, "remove", failing)
        with pytest.raises(OSError, match="no"):
            holdings.return_free_segments(0)
    assert holdings.allocator.free_bytes == SEGMENT_BYTES
    holdings.return_free_segments(0)
    assert list(holdings.volume.segments()) == []


def test_a_namespace_keeps_all_of_its_segments(tmp_path: Path) -> None:
    device = EmulatedNvme(8 * MIB)
    holdings = Holdings(NvmeVolume(device, tmp_path, SEGMENT_BYTES), FlushLatch())
    holdings.load()
    device.executed.clear()
    holdings.return_free_segments(1)
    assert len(holdings.volume.segments()) == 7
    assert device.executed == []
    holdings.volume.close()


def test_extents_that_change_their_path_are_told_and_counted(holdings: Holdings) -> None:
    numbers = [take(holdings, 4096 * (1 + index)) for index in range(4)]
    kept, freed, resident, gone = numbers
    assert holdings.set_paths([resident], IoPath.PAGE_CACHE) == [(12288, 12288)]
    holdings.extents.rows["is_freed"][freed] = True
    holdings.end_writing(gone, keep=False)
    changed = holdings.set_paths(np.array(numbers), IoPath.PAGE_CACHE)
    assert changed == [(0, 4096)]
    assert holdings.resident_bytes == 4096 + 12288
    assert len(holdings.set_paths([kept, resident], IoPath.DIRECT)) == 2
    assert holdings.resident_bytes == 0


# --- uses ---


def test_a_stranger_under_a_number_that_was_given_out_again_is_not_touched(
    open_engine: Open,
) -> None:
    engine = open_engine()
    keys = keys_of("a", 2)
    for key in keys:
        put_chunks(engine, [key])
    with engine.index.reading() as view:
        versions = list(view.versions(1, keys).values())
    engine.delete(BUCKET.name, keys[1:])
    put(engine, "stranger", b"an ordinary object")
    with engine.index.reading() as view:
        assert view.versions(1, ["stranger"])["stranger"].number == versions[1].number
    objects = engine.holdings.objects.rows
    first, stranger = (version.number for version in versions)
    before = int(objects["last_used"][stranger])
    engine.holdings.used(versions, are_prefix=True)
    assert objects["parent_hash"][stranger] == 0
    assert objects["last_used"][stranger] == before < objects["last_used"][first]


# --- rounds in which something fails ---


def test_a_flush_that_fails_keeps_no_other_step_from_its_turn(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> None:
        raise StorageFull("the device is full")

    now_s = [1000.0]
    engine = open_engine(
        capacity_bytes=8 * MIB, high_watermark=0.3, low_watermark=0.2, clock=lambda: now_s[0]
    )
    engine.create_bucket(BucketInfo(name="brief", owner="o", region="r", created_s=0.0))
    engine.set_policy("brief", BucketPolicy(durability=Durability.ASYNC, ttl_s=10.0))
    put(engine, "old", b"x", bucket="brief")
    put_chunks(engine, keys_of("a", 5 * MIB // CHUNK_BYTES))
    now_s[0] += 60
    monkeypatch.setattr(engine.stored.flusher, "flush", failing)
    for turn in range(100):
        engine.upkeep.round(now_s=FIRST_S + 0.5 * turn)
    assert engine.upkeep.expired_objects == 1
    assert engine.evictor.evicted_objects > 0
    assert caplog.text.count("the device is full") == 1
    engine.upkeep.round(now_s=FIRST_S + 60.0)
    assert caplog.text.count("the device is full") == 2
    monkeypatch.undo()


def test_a_bucket_whose_row_is_damaged_ends_nothing_but_is_told(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [1000.0]
    engine = open_engine(clock=lambda: now_s[0])
    engine.set_policy(BUCKET.name, BucketPolicy(ttl_s=10.0))
    engine.create_bucket(BucketInfo(name="broken", owner="o", region="r", created_s=0.0))
    put(engine, "old", b"x")
    now_s[0] += 60
    with engine.index.writing() as change:
        buckets = change._databases.buckets
        stored = change._txn.get(b"broken", db=buckets)
        assert stored is not None
        change._txn.put(b"broken", stored[:-1] + bytes([stored[-1] ^ 1]), db=buckets)
    with caplog.at_level(logging.ERROR):
        engine.upkeep.round(now_s=FIRST_S)
        engine.upkeep.round(now_s=FIRST_S + 0.5)
    assert engine.upkeep.expired_objects == 1
    assert caplog.text.count("broken") == 1
    with engine.index.reading() as view:
        assert [row.info.name for row in view.bucket_rows()] == [BUCKET.name]
        assert view.damage.buckets == {"broken"}


def test_what_was_missed_in_a_data_file_that_is_gone_is_no_error(
    open_engine: Open, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine(page_cache_bytes=64 * MIB)
    put(engine, "key", content("key", 100_000))
    engine.volume.drop_cache(0, engine.volume.segment_bytes)
    read(engine, "key")
    engine.delete(BUCKET.name, ["key"])
    engine.holdings.return_free_segments(0)
    engine.volume.prefetch(0, 4096)
    engine.upkeep.round(now_s=FIRST_S)
    assert caplog.text == ""


# --- eviction and compaction that have nothing to do ---


def test_an_eviction_that_freed_nothing_is_not_tried_again_at_once(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(capacity_bytes=8 * MIB, high_watermark=0.3, low_watermark=0.2)
    put(engine, "ordinary", content("ordinary", 4 * MIB))
    tries: list[int] = []
    evict = engine.evictor.evict

    def counted(wanted_bytes: int) -> int:
        tries.append(wanted_bytes)
        return evict(wanted_bytes)

    monkeypatch.setattr(engine.evictor, "evict", counted)
    for turn in range(10):
        engine.upkeep.round(now_s=FIRST_S + 0.5 * turn)
    assert len(tries) == 1
    put(engine, "another", b"x")
    engine.upkeep.round(now_s=FIRST_S + 5.0)
    assert len(tries) == 2
    engine.upkeep.round(now_s=FIRST_S + 5.0 + upkeep_thread.FRUITLESS_EVICTION_S)
    assert len(tries) == 3


def test_a_store_that_lies_as_it_should_is_planned_again_once_it_changed(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(compaction_bytes_per_s=1 << 40, compaction_idle_s=0.0)
    put_chunks(engine, ["a"])
    looks: list[int] = []
    snapshot = engine.holdings.snapshot

    def counted() -> object:
        looks.append(1)
        return snapshot()

    monkeypatch.setattr(engine.holdings, "snapshot", counted)
    for turn in range(5):
        engine.upkeep.compactor.round(FIRST_S + 60.0 * turn)
    assert len(looks) == 1
    for key in keys_of("b", 4):
        put_chunks(engine, [key])
    for turn in range(5, 10):
        engine.upkeep.compactor.round(FIRST_S + 60.0 * turn)
    assert engine.upkeep.compactor.moved_objects == 5
    assert len(looks) == 3  # the move, and that nothing is left


def test_a_chunk_that_proves_damaged_when_it_is_moved_is_dropped_and_counted(
    open_engine: Open, tmp_path: Path
) -> None:
    engine = open_engine(compaction_bytes_per_s=1 << 40, compaction_idle_s=0.0)
    keys = keys_of("a", 4)
    for key in keys:
        put_chunks(engine, [key])
    data_file = tmp_path / "data" / "data" / "000000"
    at = data_file.read_bytes().index(content(keys[1], CHUNK_BYTES)[:64])
    with data_file.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"rot")
        os.fsync(file.fileno())
    for turn in range(3):
        engine.upkeep.compactor.round(FIRST_S + 60.0 * turn)
    status = engine.status()
    assert (status.damaged, status.compacted_objects) == (1, 3)
    assert read(engine, keys[1]) is None
    for key in (keys[0], *keys[2:]):
        assert read(engine, key) == content(key, CHUNK_BYTES)
