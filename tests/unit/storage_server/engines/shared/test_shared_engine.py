"""Servers of one store: what one sees of the other, and what faults of the store do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from objectcache_schemas.errors import (
    Conflict,
    DamagedData,
    NotFound,
    PreconditionFailed,
    StorageFull,
    Unavailable,
)
from objectcache_schemas.limits import KIB
from objectcache_schemas.records import (
    BucketConfiguration,
    BucketPolicy,
    Condition,
    Freshness,
    Quota,
    Verification,
)
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.shared.engine import SharedEngine
from objectcache_storage_server.engines.shared.shared_catalog import UnknownOutcome
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.testing import FaultyStore
from tests.contract.engine_suite import (
    BUCKET,
    LAYOUT,
    content,
    put,
    put_batch,
    read,
    read_range,
    staged_put,
    stored_keys,
)
from tests.contract.opened_engines.shared_engines import open_server
from tests.contract.test_engines import run_together

ABSENT = Condition(absent=True)
IMMUTABLE = Condition(immutable=True)
KV = msgspec.structs.replace(BUCKET, name="kv")


class Servers:
    """Servers of one store without a bell, each with faults of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = MemoryStoreState()
        self.stores: list[FaultyStore] = []
        self.engines: list[SharedEngine] = []
        self._folder = folder

    def start(self) -> tuple[SharedEngine, FaultyStore]:
        store = FaultyStore(MemoryStore(self.state))
        store.capabilities = replace(store.capabilities, has_bell=False, object_bytes_max=64 * KIB)
        engine = open_server(store, self._folder / f"{len(self.engines)}")
        self.stores.append(store)
        self.engines.append(engine)
        return engine, store

    def object_names(self) -> set[str]:
        with self.state.changed:
            return {name for name in self.state.objects if name.startswith("data/")}

    def close(self) -> None:
        for store in self.stores:
            store.release()
        for engine in self.engines:
            engine.close()


@contextlib.contextmanager
def hasty(engine: SharedEngine, call_s_max: float) -> Generator[None]:
    """Calls wait no longer than this for the store, as whoever expects no answer wants it."""
    before_s, engine._writer.call_s_max = engine._writer.call_s_max, call_s_max
    try:
        yield
    finally:
        engine._writer.call_s_max = before_s


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    opened = Servers(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def two(servers: Servers) -> tuple[SharedEngine, SharedEngine]:
    first, _ = servers.start()
    second, _ = servers.start()
    first.create_bucket(BUCKET)
    return first, second


# --- what one server sees of the other ---


def test_what_was_acknowledged_by_one_server_is_read_by_the_other_at_once(
    two: tuple[SharedEngine, SharedEngine],
) -> None:
    first, second = two
    for number in range(20):
        put(first, "key", b"%d" % number)
        assert read(second, "key") == b"%d" % number
        assert second.stat(BUCKET.name, "key").size_bytes == len(b"%d" % number)
        put(second, f"{number}", b"")
        assert stored_keys(first)[-1:] == ["key"]
        assert first.match(BUCKET.name, [f"{number}"]) == 1
        first.delete(BUCKET.name, [f"{number}"])
        assert second.match(BUCKET.name, [f"{number}"]) == 0


def test_a_bucket_made_by_another_server_is_there_at_once(
    two: tuple[SharedEngine, SharedEngine],
) -> None:
    first, second = two
    first.create_bucket(KV)
    put(second, "key", b"data", bucket=KV.name)
    assert read(first, "key", KV.name) == b"data"
    with pytest.raises(NotFound):
        second.bucket("none")


@pytest.mark.parametrize(
    ("layout", "reads", "asks"),
    [
        (False, None, True),
        (True, None, False),
        (False, Freshness.INDEXED, False),
        (True, Freshness.FRESH, True),
    ],
)
def test_reads_ask_for_the_logs_end_as_the_bucket_has_it(
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    layout: bool,
    reads: Freshness | None,
    asks: bool,
) -> None:
    engine, _ = servers.start()
    engine.create_bucket(KV)
    if layout:
        engine.set_layout(KV.name, LAYOUT)
    engine.set_policy(KV.name, BucketPolicy(reads=reads))
    put(engine, "key", content("chunk", LAYOUT.chunk_bytes), bucket=KV.name)

    asked: list[float] = []
    follow = engine.catalog.follow

    def noted(deadline_s: float) -> None:
        asked.append(deadline_s)
        follow(deadline_s)

    monkeypatch.setattr(engine.catalog, "follow", noted)
    actions: list[Callable[[], object]] = [
        lambda: engine.stat(KV.name, "key"),
        lambda: engine.match(KV.name, ["key"]),
        lambda: engine.open_many(KV.name, ["key"]).close(),
        lambda: engine.scan(KV.name, "", "", 10),
    ]
    for action in actions:
        asked.clear()
        action()
        assert bool(asked) is asks


def test_a_put_is_not_refused_by_what_is_not_true_any_more(
    two: tuple[SharedEngine, SharedEngine],
) -> None:
    first, second = two
    put(first, "key", b"old")
    read(second, "key")
    first.delete(BUCKET.name, ["key"])
    put(second, "key", b"new", ABSENT)
    assert read(first, "key") == b"new"
    with pytest.raises(PreconditionFailed):
        put(first, "key", b"other", ABSENT)


def test_an_immutable_put_of_what_another_server_deleted_stores_it_again(
    two: tuple[SharedEngine, SharedEngine],
) -> None:
    first, second = two
    put(first, "key", b"data", IMMUTABLE)
    assert put(second, "key", b"data", IMMUTABLE).existed
    first.delete(BUCKET.name, ["key"])
    assert not put(second, "key", b"data", IMMUTABLE).existed
    with pytest.raises(Conflict):
        put(first, "key", b"other", IMMUTABLE)


def test_a_quota_holds_over_servers(two: tuple[SharedEngine, SharedEngine]) -> None:
    first, second = two
    first.set_policy(BUCKET.name, BucketPolicy(quota_bytes=10))
    put(second, "a", b"123456")
    with pytest.raises(StorageFull) as caught:
        put(first, "b", b"12345")
    assert caught.value.code == "QuotaExceeded"
    put(first, "a", b"1")  # in place of six bytes
    put(second, "b", b"12345")


@pytest.mark.parametrize("kind", ["policy", "stored_bytes", "object_count"])
def test_servers_that_put_at_once_fill_a_bucket_s_quota_and_do_not_exceed_it(
    two: tuple[SharedEngine, SharedEngine], kind: str
) -> None:
    first, _ = two
    if kind == "policy":
        first.set_policy(BUCKET.name, BucketPolicy(quota_bytes=6))
    else:
        quota = Quota(**{kind: 6})
        first.configure_bucket(BUCKET.name, BucketConfiguration(quota=quota))

    def try_put(number: int) -> bool:
        try:
            put(two[number % 2], f"{number}", b"1")
        except StorageFull as full:
            return full.code != "QuotaExceeded"
        return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(try_put, range(16))) == 6
    assert len(stored_keys(first)) == 6
    put(first, stored_keys(first)[0], b"2")  # in place of another byte


def test_a_pin_holds_over_servers(two: tuple[SharedEngine, SharedEngine]) -> None:
    first, second = two
    seen = [put(first, key, b"12").info for key in ("kept", "gone")]
    assert first.pin(BUCKET.name, ["kept", "missing"], True) == 1
    assert second.expire(BUCKET.name, seen).object_count == 1
    assert stored_keys(second) == ["kept"]


# --- what stays in the store ---


def test_a_refused_put_leaves_no_object(servers: Servers) -> None:
    engine, _ = servers.start()
    engine.create_bucket(BUCKET)
    put(engine, "key", b"data")
    before = servers.object_names()
    with pytest.raises(PreconditionFailed):
        put_batch(engine, {"other": b"12", "key": b"34"}, ABSENT)
    with pytest.raises(NotFound):
        engine.commit([missing_bucket_put(engine)])
    assert put(engine, "key", b"data", IMMUTABLE).existed
    engine.close()
    servers.engines.clear()
    assert servers.object_names() == before


def missing_bucket_put(engine: SharedEngine) -> StagedPut:
    engine.create_bucket(KV)
    staged = staged_put(engine, "key", b"data", bucket=KV.name)
    engine.delete_bucket(KV.name)
    return staged


def test_a_put_whose_record_may_have_been_appended_leaves_its_objects(servers: Servers) -> None:
    engine, store = servers.start()
    other, _ = servers.start()
    engine.create_bucket(BUCKET)
    for call_s_max in (0.3, 3.0, 30.0):  # what a busy machine has not begun by then is given up
        staged = staged_put(engine, "key", b"data")
        staged.staged.begin_finish()  # type: ignore[attr-defined]
        staged.staged.finish()  # type: ignore[attr-defined]
        store.hold(keep_late_calls=True)
        with hasty(engine, call_s_max), pytest.raises(Unavailable) as refused:
            engine.commit([staged])
        if isinstance(refused.value, UnknownOutcome):
            break
        store.release()
    assert isinstance(refused.value, UnknownOutcome)
    assert servers.object_names()
    store.release()
    # Whether it is stored is for the log to say; what is stored can be read.
    found = read(other, "key")
    assert found in (None, b"data")


def test_an_append_that_timed_out_and_was_carried_out_is_a_success(servers: Servers) -> None:
    engine, store = servers.start()
    other, _ = servers.start()
    engine.create_bucket(BUCKET)
    store.time_out("append", is_carried_out=True)
    put(engine, "key", b"data")
    assert read(other, "key") == read(engine, "key") == b"data"


# --- damage ---


def test_damage_drops_an_object_for_every_server(
    two: tuple[SharedEngine, SharedEngine], servers: Servers
) -> None:
    first, second = two
    put_batch(first, {"rotten": content("r", 200_000), "sound": b"data"})
    with first.open_many(BUCKET.name, ["rotten"]):
        name = next(name for name in servers.object_names() if name.endswith(".2"))
    servers.stores[1].flip(name, 7)
    with pytest.raises(DamagedData) as caught:
        read(second, "rotten")
    assert caught.value.details.key == "rotten"
    assert (second.damaged_count, first.damaged_count) == (1, 0)
    assert stored_keys(first) == stored_keys(second) == ["sound"]


def test_what_another_server_deleted_and_removed_is_missing_and_no_damage(
    two: tuple[SharedEngine, SharedEngine], servers: Servers
) -> None:
    first, second = two
    data = content("gone", 1000)
    put(first, "key", data)
    opened = second.open_many(BUCKET.name, ["key"])
    first.delete(BUCKET.name, ["key"])
    assert read_range(opened, 0, 0, 1000) == data  # for the grace
    servers.stores[1].lose(*servers.object_names())
    with pytest.raises(NotFound):
        read_range(opened, 0, 0, 1000)
    assert second.damaged_count == 0


def test_an_object_of_the_store_that_is_lost_is_damage(
    two: tuple[SharedEngine, SharedEngine], servers: Servers
) -> None:
    first, second = two
    put(first, "key", content("lost", 1000))
    servers.stores[1].lose(*servers.object_names())
    with pytest.raises(DamagedData):
        read(second, "key")
    assert read(first, "key") is None
    assert second.damaged_count == 1


def test_a_store_that_does_not_answer_drops_nothing(servers: Servers) -> None:
    engine, store = servers.start()
    engine.create_bucket(BUCKET)
    put(engine, "key", b"data")
    opened = engine.open_many(BUCKET.name, ["key"])
    store.hold()
    for action in (
        lambda: read_range(opened, 0, 0, 4),
        lambda: read(engine, "key"),
        lambda: put(engine, "other", b"data"),
        lambda: engine.delete(BUCKET.name, ["key"]),
    ):
        with hasty(engine, 0.3), pytest.raises(Unavailable):
            action()
    store.release()
    assert engine.damaged_count == 0
    assert read_range(opened, 0, 0, 4) == b"data"


def test_an_unreadable_version_is_put_right_by_a_put_of_the_same_key(servers: Servers) -> None:
    engine, store = servers.start()
    engine.create_bucket(BUCKET)
    put(engine, "key", content("bytes", 10_007), block_bytes=1000)
    (name,) = servers.object_names()
    store.flip(name, 10_000)
    again = put(engine, "key", content("bytes", 10_007), IMMUTABLE, block_bytes=64)
    assert not again.existed
    assert read(engine, "key") == content("bytes", 10_007)


# --- policies ---


def test_what_is_compared_follows_the_policy(servers: Servers) -> None:
    engine, store = servers.start()
    engine.create_bucket(BUCKET)
    data = content("data", 1000)
    put(engine, "key", data)
    store.flip(next(iter(servers.object_names())), 10)
    engine.set_policy(BUCKET.name, BucketPolicy(verification=Verification.OFF))
    assert read(engine, "key") != data
    engine.set_policy(BUCKET.name, BucketPolicy())
    with pytest.raises(DamagedData):
        read(engine, "key")


# --- races ---


def test_of_two_servers_puts_of_one_absent_key_one_wins(
    two: tuple[SharedEngine, SharedEngine],
) -> None:
    for attempt in range(10):
        key = f"{attempt}"
        results = run_together(2, partial(put_number, two, key))
        losers = [n for n, result in enumerate(results) if isinstance(result, PreconditionFailed)]
        assert len(losers) == 1
        for engine in two:
            assert read(engine, key) == b"%d" % (1 - losers[0])


def put_number(engines: tuple[SharedEngine, SharedEngine], key: str, number: int) -> None:
    put(engines[number], key, b"%d" % number, ABSENT)


def test_the_same_chunks_put_through_two_servers_are_stored_once(
    two: tuple[SharedEngine, SharedEngine],
) -> None:
    shape = PrefixShape([f"{i}" for i in range(70)], 4, 1024, layerwise=True)
    payload = memoryview(content("payload", shape.total_bytes))
    staged = []
    for engine in two:
        prefix = engine.stage_prefix(BUCKET.name, shape)
        prefix.write(0, payload)
        staged.append([StagedPut(each, "") for each in prefix.staged])
    committed = [engine.commit(puts, IMMUTABLE) for engine, puts in zip(two, staged, strict=True)]
    assert [sum(one.existed for one in each) for each in committed] == [0, 70]
    assert two[1].usage(BUCKET.name).object_count == 70
