"""A faulty store has the faults that a test asks for, and no others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.stores.memory_store import MemoryStore, MemoryStoreState
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    StoreTimeout,
)
from objectcache_storage_server.testing import FaultyStore

NEVER_S = float("inf")


@pytest.fixture
def state() -> MemoryStoreState:
    return MemoryStoreState()


@pytest.fixture
def store(state: MemoryStoreState) -> Iterator[FaultyStore]:
    opened = FaultyStore(MemoryStore(state), seed=7)
    yield opened
    opened.close()


def put(store: FaultyStore, name: str, data: bytes, deadline_s: float = NEVER_S) -> None:
    store.put(name, [memoryview(data)], deadline_s)


def read(store: FaultyStore, name: str, offset_bytes: int, length_bytes: int) -> bytes:
    landing = bytearray(length_bytes)
    store.begin_reads([ObjectRead(name, offset_bytes, memoryview(landing))], NEVER_S).result()
    return bytes(landing)


def test_a_planned_timeout_is_of_one_operation_and_so_many_calls(
    store: FaultyStore, state: MemoryStoreState
) -> None:
    store.time_out("put", is_carried_out=False)
    store.time_out("put", is_carried_out=True)
    assert store.append(0, b"record", NEVER_S)
    for name in ("instead", "after"):
        with pytest.raises(StoreTimeout, match="put: seed 7"):
            put(store, name, b"data")
    put(store, "well", b"data")
    assert set(state.objects) == {"after", "well"}


def test_a_delay_that_outlasts_the_deadline_is_a_timeout_and_changes_nothing(
    store: FaultyStore, state: MemoryStoreState
) -> None:
    store.delay_s = 3600.0
    with pytest.raises(StoreTimeout):
        put(store, "a", b"data", time.monotonic() + 0.01)
    store.delay_s = 0.001
    put(store, "b", b"data")
    assert set(state.objects) == {"b"}


def test_a_call_that_is_held_goes_on_at_the_release(
    store: FaultyStore, state: MemoryStoreState
) -> None:
    store.hold()
    caller = threading.Thread(target=put, args=(store, "a", b"data"))
    caller.start()
    with pytest.raises(StoreTimeout):
        store.append(0, b"record", 0.0)
    assert state.objects == {}
    store.release()
    caller.join()
    assert set(state.objects) == {"a"}
    assert state.records == []  # it had timed out, and was not kept


def test_a_late_call_is_carried_out_at_the_release_with_the_bytes_it_had(
    store: FaultyStore, state: MemoryStoreState
) -> None:
    store.hold(keep_late_calls=True)
    data = bytearray(b"data")
    with pytest.raises(StoreTimeout):
        store.put("a", [memoryview(data)], 0.0)
    data[:] = b"over"
    assert state.objects == {}
    store.release()
    assert state.objects == {"a": b"data"}


def test_a_bell_does_not_ring_through_a_partition(store: FaultyStore) -> None:
    assert store.append(0, b"record", NEVER_S)
    store.hold()
    rung = threading.Event()

    def wait() -> None:
        store.wait_for_record(0, 3600.0)
        rung.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    store.wait_for_record(0, 0.05)
    assert not rung.is_set()
    store.release()
    waiter.join()


def test_a_full_store_refuses_puts_and_appends_only_if_asked(store: FaultyStore) -> None:
    put(store, "a", b"data")
    store.is_full = True
    with pytest.raises(StorageFull):
        put(store, "b", b"data")
    assert store.append(0, b"record", NEVER_S)
    store.records_are_refused = True
    with pytest.raises(StorageFull):
        store.append(1, b"record", NEVER_S)
    assert read(store, "a", 0, 4) == b"data"
    store.delete(["a"], NEVER_S)


def test_a_state_of_bounded_size_is_full_for_objects_before_it_is_for_records() -> None:
    store = MemoryStore(MemoryStoreState(capacity_bytes=100, reserve_bytes=10))
    store.put("a", [memoryview(bytes(90))], NEVER_S)
    with pytest.raises(StorageFull):
        store.put("b", [memoryview(bytes(11))], NEVER_S)
    assert store.append(0, bytes(20), NEVER_S)
    with pytest.raises(StorageFull):
        store.append(1, b"1", NEVER_S)
    store.delete(["a"], NEVER_S)
    assert store.append(1, b"1", NEVER_S)


def test_what_is_lost_is_lost_for_one_handle(store: FaultyStore, state: MemoryStoreState) -> None:
    put(store, "a", b"data")
    put(store, "b", b"data")
    store.lose("a")
    with pytest.raises(LostObject):
        read(store, "a", 0, 1)
    with pytest.raises(LostObject):
        store.get("a", NEVER_S)
    assert [stored.name for stored in store.list_objects("", NEVER_S)] == ["b"]
    assert MemoryStore(state).get("a", NEVER_S) == b"data"


def test_a_flip_is_in_so_many_reads_of_its_byte(
    store: FaultyStore, state: MemoryStoreState
) -> None:
    put(store, "a", b"0000")
    store.flip("a", 2, read_count=2)
    assert read(store, "a", 0, 2) == b"00"
    assert read(store, "a", 1, 3) == b"010"
    assert store.get("a", NEVER_S) == b"0010"
    assert store.get("a", NEVER_S) == b"0000"
    assert state.objects["a"] == b"0000"


def test_a_flipped_record_stays_flipped(store: FaultyStore) -> None:
    for number in range(3):
        assert store.append(number, b"00", NEVER_S)
    store.flip_record(1)
    assert store.read_log(0, 100, NEVER_S) == [b"00", b"01", b"00"]
    assert store.read_log(1, 100, NEVER_S) == [b"01", b"00"]


def test_faults_of_a_seed_are_the_same_every_time() -> None:
    def outcomes(seed: int) -> list[str]:
        store = FaultyStore(MemoryStore(MemoryStoreState()), seed)
        store.fault_rate = 0.3
        told: list[str] = []
        for number in range(100):
            try:
                put(store, f"w/{number}", b"data")
            except Unavailable as error:
                told.append(f"{number} {type(error).__name__}")
        store.close()
        return told

    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert 10 < len(outcomes(1)) < 60
    assert {told.split()[1] for told in outcomes(1)} == {"StoreTimeout", "Unavailable"}
