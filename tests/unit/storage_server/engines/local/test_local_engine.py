"""What the local engine does beyond the engine contract: room, policies, moves, recovery."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from objectcache_runtime.settings import ServerSettings, Settings, StorageSettings
from objectcache_schemas.errors import DamagedData, StorageFull, Unavailable
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import BucketPolicy, Condition, Durability, Verification
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.volumes.volume import IoPath
from objectcache_storage_server.engines.open_engine import open_engine as open_any_engine
from tests.contract.engine_suite import BUCKET, LAYOUT, content, put, read
from tests.contract.opened_engines.local_engines import small_local_engine

LAYERS, SLICE_BYTES = 4, 4 * KIB
CHUNK_BYTES = LAYERS * SLICE_BYTES
IMMUTABLE = Condition(immutable=True)
Open = Callable[..., LocalEngine]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    """Opens the same store again and again; whatever is open at the end is closed."""
    engines: list[LocalEngine] = []

    def reopen(**changes: object) -> LocalEngine:
        if engines:
            engines[-1].close()
        engines.append(small_local_engine(tmp_path / "data", **changes))  # type: ignore[arg-type]
        if not engines[-1].buckets():
            engines[-1].create_bucket(BUCKET)
        return engines[-1]

    yield reopen
    engines[-1].close()


def put_prefix(engine: LocalEngine, keys: Sequence[str], parent_key: str | None = None) -> None:
    """Store chunks whose content follows from their keys."""
    shape = PrefixShape(keys, LAYERS, SLICE_BYTES, layerwise=False, parent_key=parent_key)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    try:
        prefix.write(0, memoryview(b"".join(content(key, CHUNK_BYTES) for key in keys)))
        puts = [StagedPut(staged, "") for staged in prefix.staged]
    except BaseException:
        prefix.discard()
        raise
    engine.commit(puts, IMMUTABLE)


def prefix_keys(name: str, count: int, first: int = 0) -> list[str]:
    return [f"{name}-{index:03}" for index in range(first, first + count)]


def assert_whole(engine: LocalEngine, keys: Sequence[str]) -> None:
    for key in keys:
        assert read(engine, key) == content(key, CHUNK_BYTES), key


def touch(engine: LocalEngine, keys: Sequence[str]) -> None:
    engine.open_many(BUCKET.name, keys, are_prefix=True).close()


# --- extents ---


def test_neighbours_of_a_put_share_an_extent(open_engine: Open) -> None:
    engine = open_engine()
    keys = prefix_keys("a", 6)
    put_prefix(engine, keys)
    classes = {each.slots: each for each in engine.status().extents}
    assert {slots: each.count for slots, each in classes.items()} == {4: 1, 2: 1}
    with engine.open_many(BUCKET.name, keys) as opened:
        places = opened.placements()
    assert [place.source for place in places] == [0, 0, 0, 0, 1, 1]
    assert [place.base_bytes for place in places[:4]] == [0, 4096, 8192, 12288]


def test_chunks_that_were_stored_before_leave_their_slots_empty(open_engine: Open) -> None:
    engine = open_engine()
    put_prefix(engine, prefix_keys("a", 2))
    put_prefix(engine, prefix_keys("a", 4))
    by_slots = {each.slots: each.live_slots for each in engine.status().extents}
    assert by_slots == {2: 2, 4: 2}
    assert_whole(engine, prefix_keys("a", 4))


def test_a_put_of_what_is_all_stored_takes_no_space(open_engine: Open) -> None:
    engine = open_engine()
    put_prefix(engine, prefix_keys("a", 4))
    before = engine.status().allocated_bytes
    put_prefix(engine, prefix_keys("a", 4))
    assert engine.status().allocated_bytes == before


def test_deleting_the_last_chunk_of_an_extent_returns_its_space(open_engine: Open) -> None:
    engine = open_engine()
    keys = prefix_keys("a", 4)
    put_prefix(engine, keys)
    taken = engine.status().allocated_bytes
    assert engine.delete(BUCKET.name, keys[1:]) == 3
    assert engine.status().allocated_bytes == taken
    engine.delete(BUCKET.name, keys[:1])
    assert engine.status().allocated_bytes == 0


def test_space_that_is_read_is_not_given_out_again(open_engine: Open) -> None:
    engine = open_engine(capacity_bytes=8 * MIB, when_full="refuse")
    keys = prefix_keys("a", 256)  # half of the store
    put_prefix(engine, keys)
    with engine.open_many(BUCKET.name, keys) as opened:
        engine.delete(BUCKET.name, keys)
        put_prefix(engine, prefix_keys("b", 256))
        with pytest.raises(StorageFull):
            put_prefix(engine, prefix_keys("c", 4))
        for index, key in enumerate(keys):
            chunk = bytearray(CHUNK_BYTES)
            opened.read_into(index, 0, memoryview(chunk))
            assert chunk == content(key, CHUNK_BYTES)
    put_prefix(engine, prefix_keys("c", 4))
    assert engine.damaged_count == 0


def test_a_large_object_lies_in_several_runs(open_engine: Open) -> None:
    engine = open_engine()
    for block_bytes in (64 * KIB, 1000, 3 * MIB):
        data = content(block_bytes, 5 * MIB + 123)
        staged = engine.stage(BUCKET.name, "large", block_bytes)
        step = max(1, 300_000 // block_bytes) * block_bytes
        for begin in range(0, len(data), step):
            staged.write_at(begin, memoryview(data)[begin : begin + step])
        engine.commit([StagedPut(staged, "etag")])
        assert read(engine, "large") == data
        with engine.open_many(BUCKET.name, ["large"]) as opened:
            for begin, end in itertools.pairwise(range(0, len(data), 777_777)):
                piece = bytearray(end - begin)
                opened.read_into(0, begin, memoryview(piece))
                assert piece == data[begin:end]
    assert engine.status().extents[0].count > 1


def test_an_object_takes_no_more_than_its_bytes_in_blocks(open_engine: Open) -> None:
    engine = open_engine()
    for size_bytes in (1, 4096, 100 * KIB, 64 * KIB + 1, 1 * MIB):
        put(engine, "key", content("key", size_bytes))
        assert engine.status().allocated_bytes == -(-size_bytes // 4096) * 4096
        assert read(engine, "key") == content("key", size_bytes)


# --- room ---


def test_a_full_store_evicts_the_end_of_the_least_recent_prefix(open_engine: Open) -> None:
    # No watermark: nothing goes in the background between two looks.
    engine = open_engine(capacity_bytes=8 * MIB, high_watermark=1.0)
    old, new = prefix_keys("old", 200), prefix_keys("new", 200)
    put_prefix(engine, old)
    put_prefix(engine, new)
    touch(engine, old)
    put_prefix(engine, prefix_keys("more", 200))
    kept = {name: engine.match(BUCKET.name, keys) for name, keys in (("old", old), ("new", new))}
    assert kept["old"] == 200
    assert 0 < kept["new"] < 200
    for key in new[kept["new"] :]:
        assert read(engine, key) is None
    assert_whole(engine, [*old, *new[: kept["new"]], *prefix_keys("more", 200)])
    status = engine.status()
    assert status.evicted_objects == 200 - kept["new"]


def test_a_store_that_refuses_keeps_what_it_has(open_engine: Open) -> None:
    engine = open_engine(capacity_bytes=8 * MIB, when_full="refuse")
    put_prefix(engine, prefix_keys("a", 400))
    with pytest.raises(StorageFull, match=r"storage\.capacity_bytes"):
        put_prefix(engine, prefix_keys("b", 200))
    assert_whole(engine, prefix_keys("a", 400))
    assert engine.match(BUCKET.name, prefix_keys("b", 200)) == 0
    engine.delete(BUCKET.name, prefix_keys("a", 200, first=200))
    put_prefix(engine, prefix_keys("b", 200))


def test_ordinary_objects_are_never_evicted(open_engine: Open) -> None:
    engine = open_engine(capacity_bytes=8 * MIB)
    data = content("object", 6 * MIB)
    put(engine, "object", data)
    put_prefix(engine, prefix_keys("a", 100))
    put_prefix(engine, prefix_keys("b", 100))
    assert read(engine, "object") == data
    with pytest.raises(StorageFull):
        put(engine, "another", content("another", 3 * MIB))
    assert read(engine, "object") == data


def test_eviction_waits_for_no_reader_and_takes_nothing_that_is_read(open_engine: Open) -> None:
    engine = open_engine(capacity_bytes=8 * MIB)
    read_keys = prefix_keys("read", 300)
    put_prefix(engine, read_keys)
    with engine.open_many(BUCKET.name, read_keys):
        put_prefix(engine, prefix_keys("a", 150))
        put_prefix(engine, prefix_keys("b", 150))
        assert engine.match(BUCKET.name, read_keys) == 300


def test_pinned_chunks_and_those_before_them_stay(open_engine: Open) -> None:
    engine = open_engine(capacity_bytes=8 * MIB)
    keys = prefix_keys("pinned", 100)
    put_prefix(engine, keys)
    assert engine.pin(BUCKET.name, [keys[49], "nothing"], True) == 1
    engine = open_engine(capacity_bytes=8 * MIB)
    for turn in range(6):
        put_prefix(engine, prefix_keys(f"turn {turn}", 200))
    assert 50 <= engine.match(BUCKET.name, keys) < 100
    assert engine.pin(BUCKET.name, [keys[49]], False) == 1
    for turn in range(6, 12):
        put_prefix(engine, prefix_keys(f"turn {turn}", 200))
    assert engine.match(BUCKET.name, keys) == 0


def test_recency_and_parents_outlive_a_restart(open_engine: Open) -> None:
    engine = open_engine(capacity_bytes=8 * MIB)
    first, second = prefix_keys("first", 200), prefix_keys("second", 200)
    put_prefix(engine, first[:100])
    put_prefix(engine, first[100:], parent_key=first[99])
    put_prefix(engine, second)
    touch(engine, first)
    engine = open_engine(capacity_bytes=8 * MIB)
    put_prefix(engine, prefix_keys("more", 200))
    assert engine.match(BUCKET.name, first) == 200
    assert engine.match(BUCKET.name, second) < 200


def test_the_watermark_is_kept_in_the_background(open_engine: Open) -> None:
    engine = open_engine(capacity_bytes=8 * MIB, high_watermark=0.5, low_watermark=0.4)
    put_prefix(engine, prefix_keys("a", 400))
    engine.upkeep.round(now_s=1e9)  # whatever a round during the put has found
    status = engine.status()
    assert status.allocated_bytes <= 0.4 * status.capacity_bytes
    assert 0 < engine.match(BUCKET.name, prefix_keys("a", 400)) < 400


def test_data_files_that_hold_nothing_are_given_back(open_engine: Open) -> None:
    engine = open_engine()
    keys = [f"{index}" for index in range(24)]
    for key in keys:
        put(engine, key, content(key, 1 * MIB))
    assert engine.status().data_files >= 3
    engine.delete(BUCKET.name, keys[1:])
    engine.upkeep.round(now_s=float("inf"))
    assert engine.status().data_files == 2  # one in use, and a spare
    assert read(engine, keys[0]) == content(keys[0], 1 * MIB)
    for key in keys:
        put(engine, key, content(key, 1 * MIB))
    engine = open_engine()
    for key in keys:
        assert read(engine, key) == content(key, 1 * MIB)


# --- policies ---


def test_a_quota_evicts_within_its_bucket(open_engine: Open) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, BucketPolicy(quota_bytes=100 * CHUNK_BYTES))
    put_prefix(engine, prefix_keys("a", 80))
    put_prefix(engine, prefix_keys("b", 80))
    assert engine.match(BUCKET.name, prefix_keys("b", 80)) == 80
    assert engine.match(BUCKET.name, prefix_keys("a", 80)) <= 20


def test_a_quota_refuses_what_eviction_cannot_make_fit(open_engine: Open) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, BucketPolicy(quota_bytes=100_000))
    put(engine, "a", content("a", 60_000))
    with pytest.raises(StorageFull, match="quota_bytes") as caught:
        put(engine, "b", content("b", 60_000))
    assert caught.value.code == "QuotaExceeded"
    put(engine, "a", content("other", 90_000))  # in place of what was there
    engine.delete(BUCKET.name, ["a"])
    put(engine, "b", content("b", 60_000))


def test_objects_older_than_their_ttl_are_gone(open_engine: Open) -> None:
    now_s = [1000.0]
    engine = open_engine(clock=lambda: now_s[0])
    engine.set_policy(BUCKET.name, BucketPolicy(ttl_s=60))
    put(engine, "old", b"old")
    put(engine, "pinned", b"pinned")
    engine.pin(BUCKET.name, ["pinned"], True)
    now_s[0] += 40
    put(engine, "young", b"young")
    now_s[0] += 30
    engine.upkeep.round()
    assert [read(engine, key) for key in ("old", "young", "pinned")] == [None, b"young", b"pinned"]
    assert engine.status().expired_objects == 1


def damage_data(folder: Path, start_bytes: int, length_bytes: int) -> None:
    with open(folder / "data" / "data" / "000000", "r+b") as file:
        file.seek(start_bytes)
        before = file.read(length_bytes)
        file.seek(start_bytes)
        file.write(bytes(byte ^ 0xFF for byte in before))


def test_verification_that_is_off_delivers_what_is_there(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine()
    data = content("key", CHUNK_BYTES)
    put(engine, "key", data)
    engine.set_policy(BUCKET.name, BucketPolicy(verification=Verification.OFF))
    damage_data(tmp_path, 100, 1)
    assert read(engine, "key") == data[:100] + bytes([data[100] ^ 0xFF]) + data[101:]
    engine.set_policy(BUCKET.name, BucketPolicy(verification=Verification.FULL))
    with pytest.raises(DamagedData):
        read(engine, "key")
    assert read(engine, "key") is None


def test_every_block_is_in_one_of_sixteen_samples(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine()
    data = content("key", 64 * 1000)
    put(engine, "key", data, block_bytes=1000)
    engine.set_policy(BUCKET.name, BucketPolicy(verification=Verification.SAMPLED))
    damage_data(tmp_path, 20_500, 1)
    engine.path_use.sample = itertools.count().__next__
    with pytest.raises(DamagedData):
        [read(engine, "key") for _ in range(16)]
    assert read(engine, "key") is None
    assert engine.damaged_count == 1


# --- durability ---


def test_asynchronous_puts_are_readable_at_once_and_flushed_soon(open_engine: Open) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, BucketPolicy(durability=Durability.ASYNC))
    put_prefix(engine, prefix_keys("a", 8))
    assert_whole(engine, prefix_keys("a", 8))
    engine.upkeep.round()
    assert engine.status().unflushed_extents == 0
    with engine.index.reading() as view:
        assert view.unflushed() == []


def test_unflushed_extents_are_verified_when_the_store_opens(
    open_engine: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, BucketPolicy(durability=Durability.ASYNC))
    monkeypatch.setattr(engine.stored.flusher, "flush", lambda: None)  # as if the power went first
    keys = prefix_keys("a", 4)
    put_prefix(engine, keys)
    damage_data(tmp_path, SLICE_BYTES + 17, 1)  # layer 0 of the second chunk
    engine = open_engine()
    assert engine.damaged_count == 1
    assert engine.match(BUCKET.name, [keys[1]]) == 0
    assert_whole(engine, [keys[0], *keys[2:]])
    with engine.index.reading() as view:
        assert view.unflushed() == []


def test_objects_in_a_missing_data_file_are_gone_and_the_others_stay(
    open_engine: Open, tmp_path: Path
) -> None:
    engine = open_engine()
    names = [f"{index}" for index in range(24)]
    for name in names:
        put(engine, name, content(name, 1 * MIB))
    engine.close()
    (tmp_path / "data" / "data" / "000001").unlink()
    engine = open_engine()
    stored = [name for name in names if read(engine, name) == content(name, 1 * MIB)]
    assert 0 < len(stored) < 24
    assert engine.damaged_count == 24 - len(stored)
    put(engine, "more", content("more", 1 * MIB))
    assert read(engine, "more") == content("more", 1 * MIB)


def test_a_store_of_another_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite3").touch()
    with pytest.raises(Unavailable, match=r"storage\.engine=files"):
        small_local_engine(tmp_path)


# --- paths ---


def test_extents_change_their_path_with_the_budget(open_engine: Open) -> None:
    engine = open_engine(page_cache_bytes=4 * MIB)
    if IoPath.DIRECT not in engine.volume.paths:
        pytest.skip("the file system has no direct path")
    keys = prefix_keys("a", 400)
    put_prefix(engine, keys)
    by_name = {path.name: path for path in engine.status().paths}
    assert 3.5 * MIB < by_name["page_cache"].extent_bytes <= 4 * MIB
    assert by_name["direct"].extent_bytes > 2 * MIB
    engine = open_engine(page_cache_bytes=1 * MIB)
    engine.upkeep.round(now_s=float("inf"))
    by_name = {path.name: path for path in engine.status().paths}
    assert by_name["page_cache"].extent_bytes <= 1 * MIB
    assert_whole(engine, keys)
    assert engine.status().paths[1].read_bytes > 0


# --- compaction ---


def open_compacting(open_engine: Open, now_s: list[float]) -> LocalEngine:
    """A store that moves chunks once `now_s` has gone on, in a bucket with a layout."""
    engine = open_engine(
        compaction_bytes_per_s=1 << 40, compaction_idle_s=30.0, clock=lambda: now_s[0]
    )
    engine.set_layout(BUCKET.name, LAYOUT)
    return engine


def test_chunks_on_their_own_are_moved_together(open_engine: Open) -> None:
    now_s = [1000.0]
    engine = open_compacting(open_engine, now_s)
    keys = prefix_keys("a", 40)
    for key in keys:
        put(engine, key, content(key, LAYOUT.chunk_bytes), block_bytes=1024)
    touch(engine, keys)  # in prefix order, from which parents are learnt
    now_s[0] += 60
    settle(engine, 1e9)
    assert {each.slots for each in engine.status().extents} == {16, 8}
    assert engine.status().compacted_objects == 40
    for key in keys:
        assert read(engine, key) == content(key, LAYOUT.chunk_bytes)
    with engine.open_many(BUCKET.name, keys) as opened:
        sources = [place.source for place in opened.placements()]
    assert sources == sorted(sources)
    engine = open_engine()
    assert engine.match(BUCKET.name, keys) == 40
    assert {each.slots for each in engine.status().extents} == {16, 8}


def test_what_is_read_is_not_moved(open_engine: Open) -> None:
    now_s = [1000.0]
    engine = open_compacting(open_engine, now_s)
    keys = prefix_keys("a", 16)
    for key in keys:
        put(engine, key, content(key, LAYOUT.chunk_bytes), block_bytes=1024)
    with engine.open_many(BUCKET.name, keys, are_prefix=True):
        now_s[0] += 60
        settle(engine, 1e9)
        assert engine.status().compacted_objects == 0
    settle(engine, 2e9)
    assert engine.status().compacted_objects == 16


def settle(engine: LocalEngine, first_s: float) -> None:
    """Rounds of upkeep, a minute after each other, until nothing is left to move."""
    for turn in range(10):
        engine.upkeep.round(now_s=first_s + 60.0 * turn)


def test_engine_files_refuses_a_store_of_this_one(open_engine: Open, tmp_path: Path) -> None:
    open_engine()
    settings = Settings(
        server=ServerSettings(data_dir=str(tmp_path / "data")),
        storage=StorageSettings(engine="files"),
    )
    with pytest.raises(Unavailable, match=r"storage\.engine=local"):
        open_any_engine(settings)


def test_data_files_without_their_index_are_not_taken_for_an_empty_store(
    open_engine: Open, tmp_path: Path
) -> None:
    engine = open_engine()
    put(engine, "key", b"data")
    engine.close()
    for path in (tmp_path / "data" / "index").iterdir():
        path.unlink()
    with pytest.raises(Unavailable, match="restore the index"):
        small_local_engine(tmp_path / "data")


def test_what_could_never_be_stored_is_refused_before_anything_goes(open_engine: Open) -> None:
    engine = open_engine(capacity_bytes=16 * MIB)
    put_prefix(engine, prefix_keys("a", 100))
    engine.check_room(16 * MIB)
    with pytest.raises(StorageFull, match=r"storage\.capacity_bytes"):
        engine.check_room(16 * MIB + 1)
    assert engine.match(BUCKET.name, prefix_keys("a", 100)) == 100


@pytest.mark.parametrize("when_full", ["refuse", "evict"])
def test_an_object_is_stored_in_pieces_where_free_space_lies_in_pieces(
    open_engine: Open, when_full: str
) -> None:
    engine = open_engine(capacity_bytes=16 * MIB, extent_bytes_max=8 * MIB, when_full=when_full)
    keys = [f"object-{index:02}" for index in range(15)]
    for key in keys:
        put(engine, key, content(key, 1 * MIB))
    engine.delete(BUCKET.name, keys[::2])
    put(engine, "large", content("large", 5 * MIB + 100))
    assert read(engine, "large") == content("large", 5 * MIB + 100)
    assert [read(engine, key) for key in keys[1::2]] == [
        content(key, 1 * MIB) for key in keys[1::2]
    ]
    with pytest.raises(StorageFull, match="one run"):
        put(engine, "too-large", content("too-large", 8 * MIB))
