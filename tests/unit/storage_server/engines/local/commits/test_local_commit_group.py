"""Commits that wait at once are stored as one, and yet each is its own."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from objectcache_schemas.errors import (
    ObjectCacheError,
    PreconditionFailed,
    StorageFull,
    Unavailable,
)
from objectcache_schemas.limits import KIB
from objectcache_schemas.records import BucketPolicy, Condition
from objectcache_storage_server.engines.base import ALWAYS, Committed, PrefixShape, StagedPut
from objectcache_storage_server.engines.local.commits import commit_group
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.index.lmdb_index import IndexChange
from objectcache_storage_server.engines.local.records import Version
from tests.contract.engine_suite import BUCKET, content, put, read
from tests.contract.opened_engines.local_engines import small_local_engine
from tests.unit.storage_server.engines.local.upkeep.test_local_check import version_of

SIZE_BYTES = 4 * KIB
TIMEOUT_S = 30.0
Ranges = Sequence[tuple[int, int]]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    engine = small_local_engine(tmp_path / "data")
    engine.upkeep.close()
    engine.create_bucket(BUCKET)
    yield engine
    try:
        engine.close()
    except Unavailable:
        """A flush that failed is said of again."""


class Line:
    """Puts that wait behind one whose flush is held up."""

    def __init__(self, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.flushes: list[Ranges] = []
        self.first_thread = 0
        self._flush = engine.volume.flush
        self._is_flushing, self._go_on = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(8)
        in_line = self._in_line = threading.Semaphore(0)

        class NotedEvent(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                in_line.release()
                return super().wait(timeout)

        monkeypatch.setattr(commit_group, "Event", NotedEvent)
        monkeypatch.setattr(engine.volume, "flush", self._held_flush)
        self._first = self._pool.submit(put, engine, "first", content("first", SIZE_BYTES))
        assert self._is_flushing.wait(TIMEOUT_S)

    def _held_flush(self, ranges: Ranges) -> None:
        if not self.flushes:
            self.first_thread = threading.get_ident()
        self.flushes.append(ranges)
        self._is_flushing.set()
        assert self._go_on.wait(TIMEOUT_S)
        self._flush(ranges)

    def put(
        self, key: str, data: bytes | None = None, condition: Condition = ALWAYS
    ) -> Future[Committed]:
        """Begin a put, and return when it waits."""
        body = content(key, SIZE_BYTES) if data is None else data
        future = self._pool.submit(put, self.engine, key, body, condition)
        assert self._in_line.acquire(timeout=TIMEOUT_S)
        return future

    def release(self) -> BaseException | None:
        """Let the first go on, and wait until all have ended; returns what the first raised."""
        self._go_on.set()
        self._pool.shutdown()
        return self._first.exception()


def fail_with_eio(*_: object) -> None:
    raise OSError(errno.EIO, "as the device says")


def serial_of(engine: LocalEngine, key: str) -> int:
    return version_of(engine, key).serial


def test_puts_that_wait_at_once_share_a_flush_and_a_transaction(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(engine, monkeypatch)
    keys = [f"key-{index}" for index in range(5)]
    puts = [line.put(key) for key in keys]
    assert line.release() is None
    assert [each.result().info.key for each in puts] == keys
    assert [len(ranges) for ranges in line.flushes] == [1, 5]
    assert len({serial_of(engine, key) for key in keys}) == 1
    assert serial_of(engine, "first") < serial_of(engine, keys[0])
    for key in ["first", *keys]:
        assert read(engine, key) == content(key, SIZE_BYTES)


def test_what_was_stored_together_is_there_after_the_store_was_opened_again(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = Line(engine, monkeypatch)
    for key in ("a", "b", "c"):
        line.put(key)
    assert line.release() is None
    allocated_bytes = engine.totals().allocated_bytes
    engine.close()
    again = small_local_engine(tmp_path / "data")
    assert [read(again, key) for key in "abc"] == [content(key, SIZE_BYTES) for key in "abc"]
    assert again.totals().allocated_bytes == allocated_bytes == 4 * SIZE_BYTES
    again.close()


def test_a_put_that_is_refused_in_a_group_refuses_no_other(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(engine, monkeypatch)
    absent = Condition(absent=True)
    refused = line.put("first", b"other bytes", absent)  # absent until the first was stored
    stored = line.put("second", condition=absent)
    assert line.release() is None
    with pytest.raises(PreconditionFailed):
        refused.result()
    assert not stored.result().existed
    assert read(engine, "first") == content("first", SIZE_BYTES)
    assert read(engine, "second") == content("second", SIZE_BYTES)


def test_puts_of_one_key_are_stored_one_after_the_other(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Line(engine, monkeypatch)
    line.put("key", b"one")
    line.put("other")
    last = line.put("key", b"two")
    assert line.release() is None
    assert last.result().info.size_bytes == 3
    assert read(engine, "key") == b"two"
    assert serial_of(engine, "other") < serial_of(engine, "key")
    assert engine.totals().objects == 3


def test_a_quota_counts_what_is_stored_in_the_same_group(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.set_policy(BUCKET.name, BucketPolicy(quota_bytes=2 * SIZE_BYTES + 100))
    line = Line(engine, monkeypatch)
    fits, too_much = line.put("fits"), line.put("too-much")
    assert line.release() is None
    assert fits.result().info.size_bytes == SIZE_BYTES
    with pytest.raises(StorageFull) as refusal:
        too_much.result()
    assert refusal.value.code == "QuotaExceeded"


def test_what_spoils_a_transaction_for_all_spoils_it_only_for_its_own_put(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = IndexChange.add

    def add_unless_large(
        self: IndexChange, versions: Sequence[Version], rows: npt.NDArray[np.void]
    ) -> None:
        if "large" in [version.info.key for version in versions]:
            raise StorageFull("the index is full")
        add(self, versions, rows)

    line = Line(engine, monkeypatch)
    monkeypatch.setattr(IndexChange, "add", add_unless_large)
    before, large, after = line.put("before"), line.put("large"), line.put("after")
    assert line.release() is None
    assert not before.result().existed
    assert not after.result().existed
    with pytest.raises(StorageFull, match="index is full"):
        large.result()
    assert engine.match(BUCKET.name, ["before", "after", "large"]) == 2
    assert len(engine.holdings.objects) == 3


def test_an_extent_that_a_group_empties_together_is_free_again(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = PrefixShape(["a", "b"], 2, SIZE_BYTES, layerwise=False)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    prefix.write(0, memoryview(bytes(4 * SIZE_BYTES)))
    engine.commit([StagedPut(staged, "") for staged in prefix.staged])
    (shared,) = version_of(engine, "a").extents
    assert version_of(engine, "b").extents == (shared,)
    line = Line(engine, monkeypatch)
    line.put("a")
    line.put("b")
    assert line.release() is None
    assert serial_of(engine, "a") == serial_of(engine, "b")
    assert engine.totals().objects == 3
    assert engine.totals().allocated_bytes == 3 * SIZE_BYTES


@pytest.mark.parametrize("what", ["data", "index"])
def test_after_a_flush_that_failed_no_put_of_the_group_is_acknowledged(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    line = Line(engine, monkeypatch)
    puts = [line.put(key) for key in ("a", "b")]
    if what == "data":
        monkeypatch.setattr(engine.volume, "flush", fail_with_eio)
    else:
        sync = engine.index.sync

        def sync_first_only() -> None:
            if threading.get_ident() != line.first_thread:
                raise Unavailable("the index could not be flushed to its device")
            sync()

        monkeypatch.setattr(engine.index, "sync", sync_first_only)
    first_error = line.release()
    assert first_error is None or isinstance(first_error, Unavailable)  # as it waits for its flush
    for each in puts:
        with pytest.raises(ObjectCacheError):
            each.result()
