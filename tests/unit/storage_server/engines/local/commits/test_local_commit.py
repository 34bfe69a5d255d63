"""What a commit of the local engine promises where flushes, writes or others come in its way."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest

from objectcache_schemas.errors import ObjectCacheError, StorageFull, Unavailable
from objectcache_schemas.limits import KIB
from objectcache_schemas.records import BucketPolicy, Condition, Durability
from objectcache_storage_server.engines.base import PrefixShape, StagedPrefix, StagedPut
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.local.commits.judged_commit import LocalCommit
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.index.lmdb_index import IndexChange
from objectcache_storage_server.engines.local.records import VersionName
from objectcache_storage_server.engines.local.volumes.data_files import DataFiles
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Transfer
from objectcache_storage_server.engines.puts.put_buffers import PutBuffers
from tests.contract.engine_suite import BUCKET, content, put, read, staged_put
from tests.contract.opened_engines.local_engines import nvme_local_engine, small_local_engine
from tests.unit.storage_server.engines.local.upkeep.test_local_check import (
    flip_byte,
    rewrite,
    run_check,
    version_of,
)
from tests.unit.storage_server.engines.local.upkeep.test_local_lost_rows import damage

__all__ = ["damage"]

LAYERS, SLICE_BYTES = 4, 4 * KIB
CHUNK_BYTES = LAYERS * SLICE_BYTES
EXTENT_BYTES = 4 * CHUNK_BYTES
IMMUTABLE = Condition(immutable=True)
ASYNC, SYNC = (BucketPolicy(durability=each) for each in (Durability.ASYNC, Durability.SYNC))
Open = Callable[..., LocalEngine]
Ranges = Sequence[tuple[int, int]]


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[Open]:
    """Opens the same store again and again, without rounds of upkeep."""
    engines: list[LocalEngine] = []

    def close_last() -> None:
        with contextlib.suppress(Unavailable):  # a flush that failed is said of again
            engines[-1].close()

    def reopen(**changes: object) -> LocalEngine:
        if engines:
            close_last()
        engines.append(small_local_engine(tmp_path / "data", **changes))  # type: ignore[arg-type]
        engines[-1].upkeep.close()
        if not engines[-1].buckets():
            engines[-1].create_bucket(BUCKET)
        return engines[-1]

    yield reopen
    close_last()


@pytest.fixture
def engine(open_engine: Open) -> LocalEngine:
    return open_engine()


def begun_prefix(engine: LocalEngine, keys: Sequence[str], layers: int = LAYERS) -> StagedPrefix:
    """Chunks whose content follows from their keys, written and not committed."""
    shape = PrefixShape(keys, layers, SLICE_BYTES, layerwise=False)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    payload = b"".join(content(key, layers * SLICE_BYTES) for key in keys)
    try:
        prefix.write(0, memoryview(payload))
    except BaseException:
        prefix.discard()
        raise
    return prefix


def put_prefix(engine: LocalEngine, keys: Sequence[str], layers: int = LAYERS) -> None:
    prefix = begun_prefix(engine, keys, layers)
    engine.commit([StagedPut(staged, "") for staged in prefix.staged], IMMUTABLE)


def prefix_keys(count: int) -> list[str]:
    return [f"key-{index:03}" for index in range(count)]


def fail_with_eio(*_: object) -> None:
    raise OSError(errno.EIO, "as the device says")


def unflushed(engine: LocalEngine) -> list[int]:
    with engine.index.reading() as view:
        return view.unflushed()


# --- a flush that failed ---


@pytest.fixture
def fail_next_flush(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The kernel says of a write-back that failed once, and that all is well from then on."""
    failures: list[OSError] = []
    flush = os.fdatasync

    def fdatasync(file_descriptor: int) -> None:
        if failures:
            raise failures.pop()
        flush(file_descriptor)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return lambda: failures.append(OSError(errno.EIO, "write-back failed"))


def test_nothing_is_stored_durably_after_a_flush_that_failed_until_a_restart(
    open_engine: Open, fail_next_flush: Callable[[], None]
) -> None:
    engine = open_engine()
    put(engine, "before", content("before", 3000))
    written_before = staged_put(engine, "b", content("b", 3000))
    fail_next_flush()
    with pytest.raises(Unavailable):
        put(engine, "a", content("a", 3000))
    with pytest.raises(Unavailable, match="restart the server"):
        engine.commit([written_before])
    with pytest.raises(Unavailable, match="restart the server"):
        put(engine, "c", content("c", 3000))
    assert read(engine, "before") == content("before", 3000)
    assert [read(engine, key) for key in "abc"] == [None] * 3
    engine = open_engine()
    put(engine, "b", content("b", 3000))
    assert read(engine, "b") == content("b", 3000)


def test_what_a_failed_flush_left_out_stays_marked_as_unflushed(
    open_engine: Open, fail_next_flush: Callable[[], None]
) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, ASYNC)
    put(engine, "key", content("key", 3000))
    marked = unflushed(engine)
    fail_next_flush()
    for _ in range(2):
        with pytest.raises(Unavailable):
            engine.stored.flusher.flush()
    assert unflushed(engine) == marked != []
    assert read(engine, "key") == content("key", 3000)
    engine = open_engine()  # which verifies it
    assert unflushed(engine) == []
    assert read(engine, "key") == content("key", 3000)


def test_a_flush_does_not_count_while_one_beside_it_may_have_been_told_of_its_failure(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_told, is_through = threading.Event(), threading.Event()

    def flush(ranges: Ranges) -> None:
        if ranges == [(0, 1)]:  # has the error of both, and is slow to say so
            is_told.set()
            is_through.wait(0.2)  # that the second waits for this one cannot be seen
            fail_with_eio()

    monkeypatch.setattr(engine.volume, "flush", flush)
    monkeypatch.setattr(engine.holdings, "ranges", lambda numbers: [(numbers[0], 1)])
    with ThreadPoolExecutor(1) as thread:
        slow = thread.submit(engine.stored.flushes.flush, [0])
        is_told.wait()
        with pytest.raises(Unavailable):
            engine.stored.flushes.flush([1])
        is_through.set()
        assert isinstance(slow.exception(), Unavailable)


def test_an_error_of_before_the_start_is_said_of_once_and_ends_nothing(
    open_engine: Open, fail_next_flush: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    engine.set_policy(BUCKET.name, ASYNC)
    monkeypatch.setattr(engine.stored.flusher, "flush", lambda: None)  # as if the power went first
    put(engine, "key", content("key", 3000))
    dropped: list[int] = []
    flush, drop_cache = DataFiles.flush, DataFiles.drop_cache

    def failing_once(volume: DataFiles, ranges: Ranges) -> None:
        monkeypatch.setattr(DataFiles, "flush", flush)
        fail_next_flush()
        flush(volume, ranges)

    def counted(volume: DataFiles, offset_bytes: int, length_bytes: int) -> None:
        dropped.append(offset_bytes)
        drop_cache(volume, offset_bytes, length_bytes)

    monkeypatch.setattr(DataFiles, "flush", failing_once)
    monkeypatch.setattr(DataFiles, "drop_cache", counted)
    engine = open_engine()
    assert dropped, "what memory has is no proof that the device has it"
    assert unflushed(engine) == []
    assert read(engine, "key") == content("key", 3000)
    put(engine, "more", content("more", 3000))


def test_nothing_counts_where_another_flush_failed_during_a_commit(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staged_put(engine, "key", content("key", 3000))
    store = engine._commit_groups.store

    def failing_after(commit: LocalCommit) -> None:
        store(commit)
        engine.flush_latch.end("the data", OSError(errno.EIO, "of another"))

    monkeypatch.setattr(engine._commit_groups, "store", failing_after)
    with pytest.raises(Unavailable, match="restart the server"):
        engine.commit([staged])


def test_the_index_is_flushed_by_its_own_descriptor_and_counts_only_while_all_went_well(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    index = engine.index
    monkeypatch.setattr(os, "fdatasync", flushed.append)
    with index.writing(durable=False) as change:
        change.bucket(BUCKET.name)
        change.replace_bucket(change.bucket(BUCKET.name).number, BUCKET)
    index.sync()
    assert flushed == [index._own_descriptor]
    engine.flush_latch.end("the index", OSError(errno.EIO, "of another"))
    with pytest.raises(Unavailable, match="restart the server"):
        index.sync()
    assert flushed == [index._own_descriptor], "somebody has synced already"


def test_a_commit_without_room_ends_acknowledging_where_a_write_was_lost_beside_it(
    engine: LocalEngine, fail_next_flush: Callable[[], None]
) -> None:
    no_room = lmdb.MapFullError("full")
    assert not engine.index._is_failed_flush(no_room)
    fail_next_flush()
    assert engine.index._is_failed_flush(no_room)


def test_a_data_file_that_cannot_be_made_ends_acknowledging_only_where_a_flush_failed(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise PermissionError(errno.EACCES, "as somebody has set it")

    monkeypatch.setattr(engine.volume, "extend", refuse)
    with pytest.raises(PermissionError):
        engine.holdings._new_segment()
    assert engine.flush_latch.failure == ""
    monkeypatch.setattr(engine.volume, "extend", fail_with_eio)
    with pytest.raises(Unavailable):
        engine.holdings._new_segment()
    assert engine.flush_latch.failure


# --- others between a commit and what follows it ---


class OnceReleased:
    """A lock that lets `action` in, once, as soon as its holder has left."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._actions = [action]

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._actions:
            self._actions.pop()()


@pytest.mark.parametrize("policy", [SYNC, ASYNC])
def test_an_object_may_be_deleted_as_soon_as_it_is_named(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch, policy: BucketPolicy
) -> None:
    engine = open_engine(page_cache_bytes=0)
    engine.set_policy(BUCKET.name, policy)

    def delete() -> None:
        engine.delete(BUCKET.name, ["key"])
        engine.holdings.return_free_segments(0)  # the data file goes with it

    monkeypatch.setattr(engine.stored, "changing", OnceReleased(delete))
    put(engine, "key", content("key", 9000))
    engine.upkeep.round()
    assert read(engine, "key") is None
    assert (unflushed(engine), len(engine.stored.flusher)) == ([], 0)
    assert engine.status().allocated_bytes == 0


def test_the_space_of_a_lost_object_waits_for_the_flush_of_what_was_written_to_it(
    engine: LocalEngine, damage: Callable[..., None]
) -> None:
    engine.set_policy(BUCKET.name, ASYNC)
    put(engine, "lost", content("lost", 9000))
    damage("objects", "lost")
    assert read(engine, "lost") is None
    engine.stored.forget_lost()
    engine.holdings.return_free_segments(0)
    engine.stored.flusher.flush()
    assert engine.status().allocated_bytes == 0


def test_the_space_of_what_a_check_drops_waits_for_the_flush_of_what_was_written_to_it(
    engine: LocalEngine, tmp_path: Path
) -> None:
    engine.set_policy(BUCKET.name, ASYNC)
    for key in ("whole", "torn", "wrong"):
        put(engine, key, content(key, 9000))
    place = version_of(engine, "torn").extents
    rewrite(engine, "wrong", place, 0)  # nobody is in its own extent then
    flip_byte(engine, tmp_path, "torn")
    report = run_check(engine, repair=True)
    assert (report.misplaced, report.dropped) == (1, 2)
    assert engine.status().allocated_bytes == 3 * 12 * KIB
    engine.stored.flusher.flush()
    assert engine.status().allocated_bytes == 12 * KIB
    assert read(engine, "whole") == content("whole", 9000)


# --- one extent is written while the next is gathered ---


def test_memory_for_one_extent_is_enough_for_a_put_of_two(tmp_path: Path) -> None:
    engine = nvme_local_engine(tmp_path / "data", put_buffer_bytes_max=EXTENT_BYTES)
    with contextlib.closing(engine):
        engine.create_bucket(BUCKET)
        put_prefix(engine, prefix_keys(8))
        for key in prefix_keys(8):
            assert read(engine, key) == content(key, CHUNK_BYTES)


def test_a_put_gathers_each_of_its_extents_in_the_memory_of_the_one_before(
    open_engine: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(put_buffer_bytes_max=EXTENT_BYTES, page_cache_bytes=0)
    if IoPath.DIRECT not in engine.volume.paths:
        pytest.skip("the file system has no direct path")
    write, taken = engine.volume.write, list[IoPath]()

    def noted(transfers: Sequence[Transfer], path: IoPath) -> None:
        taken.append(path)
        write(transfers, path)

    monkeypatch.setattr(engine.volume, "write", noted)
    put_prefix(engine, prefix_keys(12))
    assert taken == [IoPath.DIRECT] * 3
    for key in prefix_keys(12):
        assert read(engine, key) == content(key, CHUNK_BYTES)


def test_chunks_of_an_extent_whose_write_failed_are_not_stored_though_one_was_given_up(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(engine.volume, "write", fail_with_eio)
        prefix = begun_prefix(engine, prefix_keys(4))
        prefix.staged[0].discard()
    for kept in (prefix.staged[1:], prefix.staged[2:]):
        with pytest.raises(Unavailable, match="write to the data files"):
            engine.commit([StagedPut(staged, "") for staged in kept])
    assert engine.match(BUCKET.name, prefix_keys(4)) == 0
    assert engine.status().allocated_bytes == 0


def test_memory_that_the_system_does_not_have_is_not_counted_as_taken(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = PutBuffers(64 * KIB)
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", fail_with_eio)
        with pytest.raises(OSError, match="as the device says"):
            buffers.take(64 * KIB)
        with pytest.raises(Unavailable, match="take memory for a put"):
            put_prefix(engine, prefix_keys(4))
    assert buffers.take(64 * KIB) is not None


# --- which chunks are used, and which follow which ---


def test_of_chunks_longer_than_an_extent_the_last_is_evicted_first(open_engine: Open) -> None:
    engine = open_engine(extent_bytes_max=2 * SLICE_BYTES)
    keys = prefix_keys(3)
    put_prefix(engine, keys)
    for key in reversed(keys):  # the first was used last, though it need not have been
        engine.open_many(BUCKET.name, [key]).close()
    for count in (2, 1, 0):
        assert engine.evictor.evict(1) > 0
        assert engine.match(BUCKET.name, keys) == count
        assert engine.status().objects == count


def test_the_chunk_before_one_that_is_longer_than_an_extent_is_known(open_engine: Open) -> None:
    engine = open_engine(extent_bytes_max=2 * SLICE_BYTES)
    put_prefix(engine, prefix_keys(3))
    rows = [engine.holdings.objects.rows[version_of(engine, key).number] for key in prefix_keys(3)]
    assert [int(row["parent_hash"]) for row in rows] == [
        0,
        int(rows[0]["own_hash"]),
        int(rows[1]["own_hash"]),
    ]


def test_a_chunk_that_is_put_again_counts_as_used(engine: LocalEngine) -> None:
    for key in ("a", "b"):
        put_prefix(engine, [key])
    put_prefix(engine, ["a"])
    engine.evictor.evict(1)
    assert [engine.match(BUCKET.name, [key]) for key in ("a", "b")] == [1, 0]


# --- what changes while a commit is on its way ---


def change_policy_meanwhile(
    engine: LocalEngine, policy: BucketPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator changes the bucket's policy after a commit has seen it first."""
    make_room_in = engine.evictor.make_room_in

    def changed(bucket: BucketRow, growth_bytes: int) -> None:
        make_room_in(bucket, growth_bytes)
        engine.set_policy(BUCKET.name, policy)

    monkeypatch.setattr(engine.evictor, "make_room_in", changed)


def test_a_commit_is_durable_where_its_bucket_asks_for_it_by_then(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.set_policy(BUCKET.name, ASYNC)
    change_policy_meanwhile(engine, SYNC, monkeypatch)
    flush, sync, steps = engine.volume.flush, engine.index.sync, list[str]()

    def noted_flush(ranges: Ranges) -> None:
        flush(ranges)
        steps.append(f"flush {len(ranges)}")

    def noted_sync() -> None:
        sync()
        steps.append("sync")

    monkeypatch.setattr(engine.volume, "flush", noted_flush)
    monkeypatch.setattr(engine.index, "sync", noted_sync)
    put(engine, "key", content("key", 9000))
    assert steps == ["flush 1", "sync"]
    assert (unflushed(engine), len(engine.stored.flusher)) == ([], 0)


def test_a_commit_waits_for_its_flush_where_its_bucket_is_asynchronous_by_then(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_policy_meanwhile(engine, ASYNC, monkeypatch)
    put(engine, "key", content("key", 9000))
    assert len(engine.stored.flusher) == len(unflushed(engine)) == 1
    engine.stored.flusher.flush()
    assert unflushed(engine) == []


def test_a_pin_that_the_index_did_not_take_keeps_nothing(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_prefix(engine, ["key"])
    writing = engine.index.writing

    @contextlib.contextmanager
    def full(*, durable: bool = True) -> Generator[IndexChange, None, None]:
        with writing(durable=durable) as change:
            yield change
            raise StorageFull("no room for the commit")

    with monkeypatch.context() as patched:
        patched.setattr(engine.index, "writing", full)
        with pytest.raises(StorageFull):
            engine.pin(BUCKET.name, ["key"], True)
    engine.evictor.evict(1)
    assert engine.match(BUCKET.name, ["key"]) == 0


def test_what_the_system_raises_in_a_delete_is_an_error_of_ours(engine: LocalEngine) -> None:
    put(engine, "key", b"data")

    def choose(_: IndexChange) -> list[VersionName]:
        raise OSError(errno.EIO, "as the device says")

    with pytest.raises(ObjectCacheError):
        engine.stored.remove(choose)
    assert read(engine, "key") == b"data"
