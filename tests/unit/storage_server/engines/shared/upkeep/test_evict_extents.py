"""What is evicted, when, and by whom."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import pytest

from objectcache_schemas.errors import Busy, StorageFull
from objectcache_schemas.limits import KIB
from objectcache_schemas.records import BucketPolicy
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.judge_shared import QUOTA_ATTEMPTS_MAX
from objectcache_storage_server.engines.shared.upkeep import evict_extents
from objectcache_storage_server.engines.shared.upkeep.evict_extents import FULL_GRACES
from objectcache_storage_server.engines.shared.upkeep.lead_upkeep import NotLeading
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.shared.versions import SharedVersion
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from objectcache_storage_server.engines.stores.shared_store import StoreTimeout
from tests.contract.engine_suite import BUCKET, LAYOUT, put
from tests.unit.storage_server.engines.shared.upkeep.upkept_servers import (
    CHUNK_BYTES,
    GRACE_S,
    KV,
    UpkeptServer,
    chunk,
    object_names,
    soon,
    until,
)

Start = Callable[..., UpkeptServer]


def rules(chunks: int, **changes: object) -> UpkeepRules:
    """A capacity of so many chunks, half of which stay."""
    settings = {
        "capacity_bytes": chunks * CHUNK_BYTES,
        "high_watermark": 0.75,
        "low_watermark": 0.5,
        "grace_s": GRACE_S,
        "writer_lease_s": 3600.0,
    }
    return UpkeepRules(**{**settings, **changes})  # type: ignore[arg-type]


def test_the_least_recently_used_extents_go_down_to_the_low_watermark(start: Start) -> None:
    server = start(rules=rules(16))
    server.engine.create_bucket(KV)
    for number in range(12):
        server.put([f"{number:02}"])
    server.round(0.0)
    assert len(server.stored_keys()) == 12  # three quarters
    server.put(["12"])
    server.use(["00", "01"])
    server.round(1.0)
    assert server.stored_keys() == ["00", "01", "07", "08", "09", "10", "11", "12"]
    assert server.engine.upkeep.evictor.evicted_objects == 5
    server.round(2.0)  # what is in the graveyard is not evicted once more
    assert len(server.stored_keys()) == 8


def test_what_is_put_again_is_used(start: Start) -> None:
    server = start(rules=rules(16))
    server.engine.create_bucket(KV)
    server.engine.set_layout(KV.name, LAYOUT)
    for number in range(13):
        server.put([f"{number:02}"])
    end = server.state().end
    server.put(["00"])
    server.engine.catalog.describe_server(b"heard")
    until(lambda: server.state().end > end)
    server.round()
    assert server.stored_keys() == ["00", *(f"{number:02}" for number in range(6, 13))]


def test_servers_that_fill_one_bucket_at_once_are_not_refused(start: Start) -> None:
    first, second = start(), start()
    first.engine.create_bucket(KV)
    first.engine.set_policy(KV.name, BucketPolicy(quota_bytes=6 * CHUNK_BYTES))
    second.engine.catalog.follow(soon())

    def fill(server: UpkeptServer, name: str) -> None:
        for number in range(12):
            server.put([f"{name}-{number}"])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(fill, first, "a"), pool.submit(fill, second, "b")]:
            done.result()
    assert 0 < len(first.stored_keys()) <= 6


class Takers:
    """Others that put into a bucket each time that a server has made room there."""

    def __init__(self, server: UpkeptServer, other: UpkeptServer, monkeypatch: Any) -> None:
        self.taken_chunks: list[int] = []  # at most, each time
        self.asked_spare_bytes: list[int] = []
        self._other = other
        self._make = server.engine.upkeep.evictor.make_room_in
        monkeypatch.setattr(server.engine.upkeep.evictor, "make_room_in", self._make_room_in)

    def _make_room_in(self, bucket: Any, growth: int, deadline_s: float, spare: int = 0) -> bool:
        had_room = self._make(bucket, growth, deadline_s, spare)
        self.asked_spare_bytes.append(spare)
        taken = self.taken_chunks.pop(0) if self.taken_chunks else 0
        for number in range(taken):
            if len(self._other.stored_keys()) == 6:
                break
            self._other.put([f"taken-{len(self.asked_spare_bytes)}-{number}"])
        return had_room


def filled(start: Start, name: str) -> UpkeptServer:
    """A server whose bucket is as full as its quota lets it be."""
    server = start()
    server.engine.create_bucket(KV)
    server.engine.set_policy(KV.name, BucketPolicy(quota_bytes=6 * CHUNK_BYTES))
    for number in range(6):
        server.put([f"{name}-{number}"])
    return server


def test_a_put_whose_room_others_take_again_and_again_asks_for_more_each_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = filled(start, "first")
    takers = Takers(server, start(), monkeypatch)
    takers.taken_chunks = [3] * 5  # at once: fewer than the room that is made in the end
    server.put(["late"])
    assert "late" in server.stored_keys()
    assert takers.asked_spare_bytes == [0, CHUNK_BYTES, 3 * CHUNK_BYTES]


def test_a_put_whose_room_others_always_take_is_busy_and_not_over_its_quota(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = filled(start, "first")
    takers = Takers(server, start(), monkeypatch)
    takers.taken_chunks = [6] * 100
    with pytest.raises(Busy, match="others fill bucket 'kv'"):
        server.put(["late"])
    assert len(takers.asked_spare_bytes) == QUOTA_ATTEMPTS_MAX
    takers.taken_chunks = []
    server.put(["late"])


def test_a_quota_of_what_cannot_go_refuses_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = filled(start, "first")
    server.engine.pin(KV.name, server.stored_keys(), True)
    takers = Takers(server, start(), monkeypatch)
    with pytest.raises(StorageFull, match="over its quota_bytes"):
        server.put(["late"])
    assert len(takers.asked_spare_bytes) == 1


def test_a_prefix_goes_from_its_end(start: Start) -> None:
    server = start(rules=rules(16))
    server.engine.create_bucket(KV)
    server.put(["root"])
    for number in range(6):
        server.put([f"other-{number}"])
    server.put(["middle"], parent_key="root")
    server.put(["end"], parent_key="middle")
    for number in range(6, 10):
        server.put([f"other-{number}"])
    server.use(["end"])  # which is not to be had without those before it
    server.round()
    left = server.stored_keys()
    assert {"root", "middle", "end"} <= set(left)
    assert len(left) == 8


def test_pinned_objects_and_those_that_are_no_cache_stay(start: Start) -> None:
    server = start(rules=rules(16))
    server.engine.create_bucket(KV)
    server.engine.create_bucket(BUCKET)
    put(server.engine, "plain", b"p" * CHUNK_BYTES)
    server.put(["first"])
    server.engine.pin(KV.name, ["first"], True)
    for number in range(12):
        server.put([f"{number:02}"])
    server.round()
    assert server.engine.stat(BUCKET.name, "plain").size_bytes == CHUNK_BYTES
    assert "first" in server.stored_keys()
    assert len(server.stored_keys()) == 7


def test_with_when_full_refuse_nothing_goes_and_puts_are_refused(start: Start) -> None:
    server = start(rules=rules(4, evicts=False))
    server.engine.create_bucket(KV)
    for number in range(4):
        server.put([f"{number}"])
    server.round()
    with pytest.raises(StorageFull, match="capacity_bytes"):
        server.put(["more"])
    assert len(server.stored_keys()) == 4


def test_a_put_over_the_capacity_evicts_and_finds_room_when_the_grace_has_passed(
    state: MemoryStoreState, start: Start
) -> None:
    server, other = start(rules=rules(4)), start(rules=rules(4))
    server.engine.create_bucket(KV)
    server.round(0.0)
    for number in range(4):
        other.put([f"{number}"])
    with pytest.raises(StorageFull, match="grace_s"):  # which need not hold the lease for it
        other.put(["more"])
    assert other.stored_keys() == ["2", "3"]
    server.round(1.0)
    server.round(1.0 + GRACE_S)
    other.put(["more"])
    assert other.stored_keys() == ["2", "3", "more"]
    assert len(object_names(state)) == 3


def test_a_full_store_is_evicted_from_and_takes_puts_again_after_the_grace(
    start: Start, state: MemoryStoreState
) -> None:
    state.capacity_bytes = 5 * CHUNK_BYTES - 1  # records lie in it, too
    server = start(rules=rules(4, capacity_bytes=0))
    server.engine.create_bucket(KV)
    for number in range(4):
        server.put([f"{number}"])
    with pytest.raises(StorageFull):
        server.put(["more"])
    assert server.stored_keys() == ["2", "3"]
    server.round(0.0)
    server.round(GRACE_S)
    server.put(["more"])
    assert server.stored_keys() == ["2", "3", "more"]
    assert server.engine.status().capacity_bytes == 4 * CHUNK_BYTES  # as it has learned


def test_a_store_that_was_full_for_a_while_is_tried_again(
    start: Start, state: MemoryStoreState
) -> None:
    server = start(rules=rules(100))
    server.engine.create_bucket(KV)
    server.put([f"{number}" for number in range(4)])
    full_s = FULL_GRACES * GRACE_S + 60.0  # a minute for what the test takes
    for is_first in (True, False):
        state.capacity_bytes = 1  # a neighbour fills the pool
        with pytest.raises(StorageFull):
            server.put(["more"])
        state.capacity_bytes = None
        known_bytes = server.engine.status().capacity_bytes
        assert known_bytes < 100 * CHUNK_BYTES
        server.round(full_s - 120.0)
        assert server.engine.status().capacity_bytes == known_bytes
        if not is_first:
            server.round(full_s)  # it is believed for longer
            assert server.engine.status().capacity_bytes == known_bytes
        server.round(full_s if is_first else 2 * full_s)
        assert server.engine.status().capacity_bytes == 100 * CHUNK_BYTES


def test_puts_do_not_wait_for_an_eviction_that_stands_still(start: Start) -> None:
    server = start(rules=rules(4))
    server.engine.create_bucket(KV)
    server.engine.set_policy(KV.name, BucketPolicy(quota_bytes=4 * CHUNK_BYTES))
    for number in range(4):
        server.put([f"{number}"])
    evictor, begun, go_on = server.engine.upkeep.evictor, threading.Event(), threading.Event()

    def late(act: Callable[[ReplayedChange], list[SharedVersion]], deadline_s: float) -> Any:
        begun.set()
        go_on.wait()
        return server.engine.catalog.change(act, deadline_s)

    with server.engine.catalog.reading() as view:
        bucket = view.bucket(KV.name)
    with ThreadPoolExecutor(3) as pool:
        try:
            eviction = pool.submit(evictor.evict, CHUNK_BYTES, late)
            assert begun.wait(60.0)
            with pytest.raises(StorageFull, match="grace_s"):
                pool.submit(server.put, ["over the capacity"]).result(60.0)
            past_s = time.monotonic()
            with pytest.raises(Busy, match="evicts for other puts"):
                pool.submit(evictor.make_room_in, bucket, CHUNK_BYTES, past_s).result(60.0)
        finally:
            go_on.set()
        assert eviction.result(60.0) == 1
    assert server.stored_keys() == ["1", "2", "3"]


def test_an_eviction_for_a_put_ends_with_its_time(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evict_extents, "RECORD_VERSIONS", 2)
    server = start()
    server.engine.create_bucket(KV)
    for number in range(8):
        server.put([f"{number}"])
    now_s = time.monotonic()  # for the evictor: the time that choosing takes does not count
    deadline_s = now_s + 60
    monkeypatch.setattr(evict_extents, "time", SimpleNamespace(monotonic=lambda: now_s))

    def late(act: Callable[[ReplayedChange], list[SharedVersion]], record_s: float) -> Any:
        nonlocal now_s
        done = server.engine.catalog.change(act, record_s)
        now_s = deadline_s
        return done

    server.engine.upkeep.evictor.evict(6 * CHUNK_BYTES, late, deadline_s=deadline_s)
    assert len(server.stored_keys()) == 6


def test_what_is_being_put_counts_until_it_is_stored_or_given_up(start: Start) -> None:
    server = start(rules=rules(4))
    server.engine.create_bucket(KV)
    staged = [server.staged([f"{number}"]) for number in range(4)]
    with pytest.raises(StorageFull):
        server.staged(["more"])
    staged[0].discard()
    server.commit(staged[1])
    server.put(["more"])
    for prefix in staged[2:]:
        server.commit(prefix)
    assert server.stored_keys() == ["1", "2", "3", "more"]


def test_a_put_that_fails_has_evicted_nothing_from_its_bucket(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    server.engine.create_bucket(KV)
    server.engine.set_policy(KV.name, BucketPolicy(quota_bytes=2 * CHUNK_BYTES))
    server.put(["0"])
    server.put(["1"])
    prefix = server.staged(["2"])

    def fail(one: object) -> NoReturn:
        raise StoreTimeout("the store did not answer in time")

    monkeypatch.setattr(type(prefix.staged[0]), "finish", fail)
    with pytest.raises(StoreTimeout):
        server.commit(prefix)
    monkeypatch.undo()
    assert server.stored_keys() == ["0", "1"]
    server.put(["2"])
    assert "2" in server.stored_keys()


def test_a_bucket_makes_room_within_its_quota_and_takes_none_of_others(start: Start) -> None:
    server = start()
    other = msgspec.structs.replace(KV, name="other")
    server.engine.create_bucket(other)
    server.engine.create_bucket(KV)
    put(server.engine, "old", b"o" * CHUNK_BYTES, bucket=other.name)
    server.engine.set_policy(KV.name, BucketPolicy(quota_bytes=3 * CHUNK_BYTES))
    for number in range(5):
        server.put([f"{number}"])
        assert len(server.stored_keys()) <= 3
    assert server.stored_keys()[-1] == "4"
    assert server.engine.stat(other.name, "old").size_bytes == CHUNK_BYTES
    with pytest.raises(StorageFull):
        server.put([f"at once {number}" for number in range(4)])


def test_an_old_lease_holder_evicts_nothing(start: Start) -> None:
    old, new = start(rules=rules(16)), start()
    old.engine.create_bucket(KV)
    old.round()
    for number in range(13):
        new.put([f"{number:02}"])
    old.engine.catalog.follow(soon())
    new.fence(old)
    with pytest.raises(NotLeading):
        old.engine.upkeep.evictor.keep_below_watermark(old.engine.upkeep.lead.change)
    assert len(new.stored_keys()) == 13


def test_what_is_used_or_continued_while_victims_are_chosen_stays(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, other = start(rules=rules(16)), start()
    server.engine.create_bucket(KV)
    for number in range(13):
        server.put([f"{number:02}"])
    other.engine.catalog.follow(soon())
    follow = server.engine.catalog.follow
    change = server.engine.catalog.change

    def after_choosing(act: object, deadline_s: float) -> object:
        monkeypatch.undo()
        other.use(["00"])
        other.put(["new"], parent_key="01")
        follow(soon())
        return change(act, deadline_s)  # type: ignore[arg-type]

    monkeypatch.setattr(server.engine.catalog, "change", after_choosing)
    server.engine.upkeep.evictor.evict(5 * CHUNK_BYTES, server.engine.catalog.change)
    assert server.stored_keys() == ["00", "01", *(f"{number:02}" for number in range(5, 13)), "new"]
    assert server.read("00") == chunk("00")


def test_what_was_stored_since_choosing_is_read_in_one_record_and_in_no_later_one(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evict_extents, "RECORD_VERSIONS", 2)
    server = start()
    server.engine.create_bucket(KV)
    for number in range(8):
        server.put([f"{number:02}"])
    change, read, tries = server.engine.catalog.change, Counter[str](), [0]
    stored_rows = ReplayedChange.stored_rows

    def counted(view: ReplayedChange, first_serial: int = 0) -> Iterator[tuple[int, bytes]]:
        for serial, row in stored_rows(view, first_serial):
            read[f"record {tries[0]}"] += 1
            yield serial, row

    def change_after_puts(act: Callable[[ReplayedChange], Any], deadline_s: float) -> Any:
        tries[0] += 1
        if tries[0] == 1:
            server.put(["new-0", "new-1", "new-2"], parent_key="07")
        return change(act, deadline_s)

    monkeypatch.setattr(ReplayedChange, "stored_rows", counted)
    server.engine.upkeep.evictor.evict(8 * CHUNK_BYTES, change_after_puts)
    assert tries[0] == 4
    assert read == {"record 1": 3}
    assert server.stored_keys() == ["07", "new-0", "new-1", "new-2"]


def test_eviction_goes_on_where_a_crash_or_a_fault_interrupted_it(start: Start) -> None:
    server = start(rules=rules(16))
    server.engine.create_bucket(KV)
    for number in range(13):
        server.put([f"{number:02}"])
    server.engine.upkeep.lead.claim(soon())
    server.store.records_are_refused = server.store.is_full = True
    server.round(0.0)
    assert len(server.stored_keys()) == 13
    server.store.records_are_refused = server.store.is_full = False
    server.round(1.0)
    assert len(server.stored_keys()) == 8


def test_rows_of_the_store_count_what_they_take(start: Start, state: MemoryStoreState) -> None:
    server = start()
    server.engine.create_bucket(KV)
    server.put([f"{number}" for number in range(40)])
    taken = server.state()
    with state.changed:
        stored_bytes = sum(len(data) for name, data in state.objects.items() if "data/" in name)
    assert taken.extent_bytes == stored_bytes == 40 * 4 * KIB
    assert taken.extent_count > 0
    server.engine.delete(KV.name, [f"{number}" for number in range(40)])
    emptied = server.state()
    assert (emptied.extent_count, emptied.extent_bytes) == (0, 0)
    assert (emptied.buried_count, emptied.buried_bytes) == (taken.extent_count, stored_bytes)
