"""Settings of the local engine: what each one changes, and which contradict each other."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectcache_runtime.settings import load_settings
from objectcache_schemas.errors import InvalidRequest, StorageFull, Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import ObjectAttributes
from objectcache_storage_server.engines.base import StagedPut
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.upkeep.move_chunks import Compactor
from objectcache_storage_server.engines.local.volumes.volume import IoPath
from tests.contract.engine_suite import BUCKET, LAYOUT, content, put, read, staged_put
from tests.contract.opened_engines.local_engines import small_local_engine


class Store:
    """One folder, opened again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._engine: LocalEngine | None = None

    def open(self, **changes: object) -> LocalEngine:
        self.close()
        self._engine = small_local_engine(self.folder, **changes)  # type: ignore[arg-type]
        if not self._engine.buckets():
            self._engine.create_bucket(BUCKET)
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "data")
    yield opened
    opened.close()


# --- space ---


def test_capacity_reserve_bytes_are_left_to_others(store: Store) -> None:
    engine = store.open(capacity_bytes=0, capacity_reserve_bytes=0)
    put(engine, "key", b"data")
    assert engine.volume.room_bytes() > 0
    engine = store.open(capacity_bytes=0, capacity_reserve_bytes=1 << 60)
    assert engine.status().capacity_bytes == engine.volume.segment_bytes
    with pytest.raises(StorageFull):
        put(engine, "key", content("key", 9 * MIB))


def put_with_long_attributes(engine: LocalEngine, count: int) -> None:
    """Objects that take no space but a page of the index each, about."""
    attributes = ObjectAttributes(user_metadata={"note": "x" * 2000})
    for keys in _batches(count):
        engine.commit([staged_put(engine, key, b"", attributes=attributes) for key in keys])


def _batches(count: int) -> Iterator[list[str]]:
    for begin in range(0, count, 500):
        yield [f"{number:06}" for number in range(begin, min(count, begin + 500))]


@pytest.mark.parametrize(("index_bytes_max", "fits"), [(16 * MIB, False), (64 * MIB, True)])
def test_the_index_grows_to_index_bytes_max_and_takes_deletes_then(
    store: Store, index_bytes_max: int, fits: bool
) -> None:
    engine = store.open(index_bytes_max=index_bytes_max)
    if fits:
        put_with_long_attributes(engine, 5000)
        assert engine.status().objects == 5000
        return
    with pytest.raises(StorageFull, match="index"):
        put_with_long_attributes(engine, 5000)
    stored = engine.status().objects
    assert 1000 < stored < 5000
    assert engine.delete(BUCKET.name, [f"{number:06}" for number in range(500)]) == 500
    put(engine, "key", b"data")
    assert read(engine, "key") == b"data"


# --- paths ---


def test_page_cache_fraction_is_the_part_that_extents_may_take(store: Store) -> None:
    budgets = [
        store.open(page_cache_bytes=-1, page_cache_fraction=fraction).status()
        for fraction in (0.1, 0.9)
    ]
    small, large = (status.page_cache_budget_bytes for status in budgets)
    if not large:
        pytest.skip("this machine has no memory left")
    assert small < large / 2  # by nine, less what others took meanwhile


@pytest.mark.parametrize("direct_io", ["auto", "threads"])
@pytest.mark.parametrize("direct_depth", [1, 3])
def test_bytes_are_the_same_at_any_direct_depth(
    store: Store, direct_io: str, direct_depth: int
) -> None:
    engine = store.open(page_cache_bytes=0, direct_io=direct_io, direct_depth=direct_depth)
    if IoPath.DIRECT not in engine.volume.paths:
        pytest.skip("the file system has no direct path")
    data = content("large", 3 * MIB + 123)
    staged = engine.stage(BUCKET.name, "large", 64 * KIB)
    for begin in range(0, len(data), 512 * KIB):
        staged.write_at(begin, memoryview(data)[begin : begin + 512 * KIB])
    engine.commit([StagedPut(staged, "etag")])
    assert read(engine, "large") == data


# --- compaction ---

RATE = 32 * KIB  # half of what the largest extent of these chunks holds
MOVE_BYTES_MAX = 16 * LAYOUT.chunk_bytes


def test_chunks_are_moved_at_compaction_bytes_per_s_at_most(store: Store) -> None:
    now_s = [1000.0]
    engine = store.open(compaction_bytes_per_s=RATE, compaction_idle_s=1.0, clock=lambda: now_s[0])
    engine.upkeep.close()  # so that nobody else moves anything
    engine.set_layout(BUCKET.name, LAYOUT)
    keys = [f"{number:03}" for number in range(128)]
    for key in keys:
        put(engine, key, content(key, LAYOUT.chunk_bytes), block_bytes=1024)
    engine.open_many(BUCKET.name, keys, are_prefix=True).close()
    now_s[0] += 60
    own = engine.upkeep.compactor
    compactor = Compactor(
        engine.stored,
        own.space,
        engine.settings,
        own.extent_bytes_max,
        lambda: now_s[0],
        engine.row_encoder,
    )
    moved = [(now_s[0], 0)]
    for seconds in itertools.chain([0.0, 1.0, 0.25, 0.25, 100.0, 0.0, 0.5], [1.0] * 40):
        now_s[0] += seconds
        compactor.round(now_s[0])
        moved.append((now_s[0], compactor.moved_bytes))
    for (begin_s, before), (end_s, after) in itertools.combinations(moved, 2):
        # A second's worth is saved up at most, and the last move may overdraw by its size.
        assert after - before <= RATE * (end_s - begin_s + 1) + MOVE_BYTES_MAX
    assert moved[7][1] - moved[4][1] <= 2 * RATE + MOVE_BYTES_MAX  # a long pause saves up no more
    assert moved[-1][1] == 128 * LAYOUT.chunk_bytes
    assert all(read(engine, key) == content(key, LAYOUT.chunk_bytes) for key in keys)


# --- contradictions ---


def test_watermarks_that_contradict_each_other_are_refused_by_name(store: Store) -> None:
    with pytest.raises(InvalidRequest, match=r"storage\.low_watermark.*, got 0\.9 and 0\.8"):
        store.open(low_watermark=0.9, high_watermark=0.8)
    assert not store.folder.exists()


def test_an_extent_is_never_larger_than_a_data_file(store: Store) -> None:
    engine = store.open(extent_bytes_max=64 * MIB, data_file_bytes=8 * MIB)
    put(engine, "key", content("key", 20 * MIB))
    assert read(engine, "key") == content("key", 20 * MIB)
    assert max(each.bytes // each.count for each in engine.status().extents) <= 8 * MIB


def test_a_small_store_has_small_data_files(store: Store) -> None:
    engine = store.open(capacity_bytes=64 * MIB, data_file_bytes=1 << 30)
    put(engine, "key", content("key", 5 * MIB))
    assert engine.status().data_files == 1
    assert engine.volume.segment_bytes == 8 * MIB


def test_a_store_without_room_for_a_data_file_is_refused_when_it_is_made(store: Store) -> None:
    with pytest.raises(InvalidRequest, match=r"raise storage\.capacity_bytes$"):
        store.open(capacity_bytes=1 * MIB)
    with pytest.raises(InvalidRequest, match=r"add space .*capacity_reserve_bytes$"):
        store.open(capacity_bytes=1 << 60, capacity_reserve_bytes=1 << 60)


def fill(engine: LocalEngine, count: int) -> None:
    for number in range(count):
        put(engine, f"key {number}", content("key", 4 * MIB))


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"capacity_bytes": 16 * MIB}, r"raise storage\.capacity_bytes$"),
        ({"capacity_reserve_bytes": 1 << 60}, r"add space .*, or lower storage\.capacity_reserve"),
    ],
)
def test_a_full_store_says_what_bounds_it(
    store: Store, settings: dict[str, int], remedy: str
) -> None:
    store.open(data_file_bytes=4 * MIB).close()
    engine = store.open(data_file_bytes=4 * MIB, when_full="refuse", **settings)
    with pytest.raises(StorageFull, match=remedy):
        engine.check_room(1 << 50)
    with pytest.raises(StorageFull, match=remedy):
        fill(engine, 5)


@pytest.mark.parametrize(
    ("capacity_bytes", "said"),
    [(6, "none is added"), (1 << 60, "the file system of server.data_dir has")],
)
def test_a_capacity_that_bounds_nothing_or_all_is_warned_of(
    store: Store, capacity_bytes: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.open(data_file_bytes=4 * MIB).close()
    assert "storage.capacity_bytes" not in caplog.text
    store.open(data_file_bytes=4 * MIB, capacity_bytes=capacity_bytes)
    assert f"storage.capacity_bytes is {capacity_bytes}, the" in caplog.text
    assert said in caplog.text


def test_watermarks_and_lengths_that_are_equal_are_no_contradiction(store: Store) -> None:
    engine = store.open(
        low_watermark=0.5, high_watermark=0.5, extent_bytes_max=8 * MIB, data_file_bytes=8 * MIB
    )
    put(engine, "key", b"data")
    engine.upkeep.round()
    assert read(engine, "key") == b"data"


@pytest.mark.parametrize("kind", ["file", "null", "missing"])
def test_an_nvme_device_that_is_none_is_refused_and_not_touched(store: Store, kind: str) -> None:
    file = store.folder.parent / "disk"
    file.write_bytes(b"precious")
    device = {"file": file, "null": Path("/dev/null"), "missing": Path("/dev/ng99n99")}[kind]
    with pytest.raises(Unavailable, match=str(device)):
        store.open(nvme_device=str(device))
    assert file.read_bytes() == b"precious"
    engine = store.open()  # the folder serves data files still
    put(engine, "key", b"data")
    assert read(engine, "key") == b"data"


@pytest.mark.parametrize("value", ["nvme0n1", "", "on"])
def test_nvme_block_device_is_a_path_or_one_of_two_words(value: str) -> None:
    with pytest.raises(InvalidRequest, match="nvme_block_device"):
        load_settings(None, {}, [f"storage.nvme_block_device={value}"])
    for good in ("auto", "off", "/dev/nvme0n1"):
        settings = load_settings(None, {}, [f"storage.nvme_block_device={good}"])
        assert settings.storage.nvme_block_device == good


def put_one_by_one(engine: LocalEngine, count: int) -> None:
    attributes = ObjectAttributes(user_metadata={"note": "x" * 2000})
    for number in range(count):
        key = f"one {number}"
        engine.commit([staged_put(engine, key, b"", attributes=attributes)])


def test_a_store_whose_index_is_full_closes(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    engine = store.open(index_bytes_max=16 * MIB)
    with pytest.raises(StorageFull, match="index"):
        put_with_long_attributes(engine, 5000)
    with pytest.raises(StorageFull, match="index"):
        put_one_by_one(engine, 1000)
    store.close()
    # Where pages were freed meanwhile, as by readers that have ended, there is room for it.
    assert all("the order of uses is not kept: write the index" in said for said in caplog.messages)
    assert store.open(index_bytes_max=64 * MIB).status().objects > 1000
