"""What the store makes of answers of DAOS, and of none: on a stand-in for its calls."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.stores.daos import daos_client, libdaos
from objectcache_storage_server.engines.stores.daos.daos_store import DaosStore
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    ObjectRead,
    StoreTimeout,
)
from tests.unit.storage_server.engines.stores.daos.stand_in import Container, DaosStandIn

RESTART, TIMED_OUT, NO_SPACE, BAD_CHECKSUM = -2025, -1011, -1007, -2021
NO_HANDLE, NOT_THERE = -1002, -1005
SHORT_S = 0.2
Open = Callable[[], tuple[DaosStore, DaosStandIn]]


def within(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def open_store() -> Iterator[Open]:
    """Opens handles of one store, each with the calls that it makes."""
    container = Container()
    opened: list[tuple[DaosStore, DaosStandIn]] = []

    def open_one() -> tuple[DaosStore, DaosStandIn]:
        calls = DaosStandIn(container)
        opened.append((DaosStore("kv", "data", create=True, calls=calls), calls))
        return opened[-1]

    yield open_one
    for store, calls in opened:
        calls.release()
        store.close()
        assert not calls.has_aborted


def test_one_handle_alone_has_made_the_store(open_store: Open) -> None:
    assert [open_store()[0].was_made for _ in range(3)] == [True, False, False]


def left_under_way(calls: DaosStandIn, act: Callable[[float], object]) -> Unavailable:
    """What a call fails with at a deadline that comes while DAOS holds it. What a busy machine had
    not begun by then has changed nothing, and is tried with a later one.
    """
    for seconds in (SHORT_S, 2.0, 30.0):
        with pytest.raises(Unavailable) as caught:
            act(within(seconds))
        if calls.held_count():
            return caught.value
    raise AssertionError("nothing was begun")


@pytest.mark.parametrize("call", ["tx_commit", "obj_fetch", "obj_update"])
def test_a_transaction_that_is_told_to_restart_is_made_again(open_store: Open, call: str) -> None:
    store, calls = open_store()
    calls.answers[call] = deque([RESTART, RESTART])
    assert store.append(0, b"record", within())
    assert store.read_log(0, 100, within()) == [b"record"]


@pytest.mark.parametrize("answer", [TIMED_OUT, NO_HANDLE, NOT_THERE])
def test_an_append_without_an_answer_is_unknown(open_store: Open, answer: int) -> None:
    """Also where a repeated call was refused: the first may have been carried out."""
    store, calls = open_store()
    calls.answers["tx_commit"] = deque([answer])
    with pytest.raises(StoreTimeout, match="may have been stored"):
        store.append(0, b"record", within())
    calls.held.add("tx_commit")
    late = left_under_way(calls, lambda deadline_s: store.append(0, b"late", deadline_s))
    assert isinstance(late, StoreTimeout)
    calls.release()
    assert store.read_log(0, 100, within()) == [b"late"]
    assert not store.append(0, b"again", within())


@pytest.mark.parametrize("call", ["obj_fetch", "obj_update", "tx_commit"])
def test_a_transaction_is_closed_when_its_last_call_has_ended(open_store: Open, call: str) -> None:
    """Not at the deadline: libdaos ends the process where one is closed under a call."""
    store, calls = open_store()
    calls.held.add(call)
    left_under_way(calls, lambda deadline_s: store.append(0, b"record", deadline_s))
    store._client.open_object(9, 0, 0, within())  # so that what was to be called before has been
    assert calls.transaction_count() == 1
    calls.release()
    assert store.append(store.log_end(0, within()), b"record", within())
    store.close()
    assert calls.transaction_count() == 0


def test_an_append_that_could_not_be_begun_is_not_unknown(open_store: Open) -> None:
    store, calls = open_store()
    calls.answers["obj_fetch"] = deque([TIMED_OUT])  # of the floor
    with pytest.raises(Unavailable, match="not begun") as caught:
        store.append(0, b"record", within())
    assert not isinstance(caught.value, StoreTimeout)
    assert store.append(0, b"record", within())


def test_where_there_is_no_space_puts_and_records_are_refused(open_store: Open) -> None:
    store, calls = open_store()
    calls.answers["obj_update"] = deque([NO_SPACE])
    with pytest.raises(StorageFull):
        store.put("w/1", [memoryview(b"data")], within())
    calls.answers["tx_commit"] = deque([NO_SPACE])
    with pytest.raises(StorageFull):
        store.append(0, b"record", within())
    assert store.log_end(0, within()) == 0


def test_a_server_that_slept_in_its_append_finds_its_number_used_and_trimmed(
    open_store: Open,
) -> None:
    (sleeping, calls), (other, _) = open_store(), open_store()
    calls.held.add("tx_commit")
    outcome: list[bool] = []
    thread = threading.Thread(target=lambda: outcome.append(sleeping.append(0, b"late", within())))
    thread.start()
    while not calls.held_count():
        time.sleep(0.001)
    for number in range(5):
        assert other.append(number, b"other", within())
    other.trim_log(5, within())
    calls.release()
    thread.join()
    assert outcome == [False]
    assert other.log_end(0, within()) == 5
    assert other.read_log(5, 100, within()) == []


def test_a_record_whose_predecessor_is_not_there_is_refused(open_store: Open) -> None:
    store, _ = open_store()
    for number in range(3):
        assert store.append(number, b"record", within())
    with pytest.raises(Unavailable, match="no record 3 for 4 to follow"):
        store.append(4, b"record", within())
    store.trim_log(3, within())
    with pytest.raises(Unavailable, match="no record 3 for 4 to follow"):
        store.append(4, b"record", within())
    assert store.append(3, b"record", within())
    assert store.read_log(3, 100, within()) == [b"record"]


def test_what_comes_after_the_deadline_lands_nowhere(open_store: Open) -> None:
    store, calls = open_store()
    store.put("w/1", [memoryview(b"there")], within())
    calls.held.add("obj_fetch")
    landing = bytearray(5)
    batch = store.begin_reads([ObjectRead("w/1", 0, memoryview(landing))], within(SHORT_S))
    with pytest.raises(StoreTimeout):
        batch.result()
    landing[:] = b"other"
    calls.release()
    assert store.get("w/1", within()) == b"there"
    assert landing == b"other"


def test_ranges_that_overlap_are_asked_for_once(open_store: Open) -> None:
    store, _ = open_store()
    data = bytes(range(100))
    store.put("w/1", [memoryview(data)], within())
    ranges = [(50, 20), (0, 10), (5, 10), (15, 5), (0, 10), (7, 1), (60, 40), (100, 0)]
    landings = [bytearray(length_bytes) for _, length_bytes in ranges]
    reads = [
        ObjectRead("w/1", offset_bytes, memoryview(landing))
        for (offset_bytes, _), landing in zip(ranges, landings, strict=True)
    ]
    store.begin_reads(reads, within()).result()
    for (offset_bytes, length_bytes), landing in zip(ranges, landings, strict=True):
        assert landing == data[offset_bytes : offset_bytes + length_bytes]


def test_a_put_that_is_carried_out_late_has_the_bytes_that_it_was_given(open_store: Open) -> None:
    store, calls = open_store()
    calls.held.add("obj_update")
    part = bytearray(b"given")
    late = left_under_way(
        calls, lambda deadline_s: store.put("w/1", [memoryview(part)], deadline_s)
    )
    assert isinstance(late, StoreTimeout)
    part[:] = b"other"
    calls.release()
    assert store.get("w/1", within()) == b"given"


def test_what_daos_cannot_read_is_lost_and_what_it_cannot_reach_is_not(open_store: Open) -> None:
    store, calls = open_store()
    store.put("w/1", [memoryview(b"there")], within())
    for answer, error in ((BAD_CHECKSUM, LostObject), (TIMED_OUT, StoreTimeout)):
        calls.answers["obj_fetch"] = deque([answer])
        read = store.begin_reads([ObjectRead("w/1", 0, memoryview(bytearray(5)))], within())
        with pytest.raises(error):
            read.result()
    assert store.get("w/1", within()) == b"there"


def test_a_server_that_was_evicted_is_told_to_start_again(open_store: Open) -> None:
    store, calls = open_store()
    calls.answers["obj_update"] = deque([NO_HANDLE])
    with pytest.raises(Unavailable, match=r"evicted from the pool.*start it again"):
        store.put("w/1", [memoryview(b"data")], within())


@pytest.mark.parametrize(
    ("call", "said"), [("pool_connect2", "pool kv"), ("cont_open2", "container data")]
)
def test_a_pool_or_container_that_is_not_there_is_named(call: str, said: str) -> None:
    calls = DaosStandIn(Container())
    calls.answers[call] = deque([NOT_THERE])
    with pytest.raises(Unavailable, match=said):
        DaosStore("kv", "data", create=True, calls=calls)


def test_a_container_without_a_store_is_not_an_empty_one() -> None:
    with pytest.raises(Unavailable, match="no store in container data"):
        DaosStore("kv", "data", calls=DaosStandIn(Container()))


def test_without_the_library_it_is_asked_for() -> None:
    try:
        ctypes.CDLL("libdaos.so.2")
    except OSError:
        with pytest.raises(Unavailable, match=r"libdaos\.so\.2 is needed"):
            DaosStore("kv", "data")
    else:
        pytest.skip("libdaos is installed here")


def test_structures_are_as_large_as_the_library_s() -> None:
    """As a compiler says of the headers of DAOS 2.9.100."""
    sizes = {
        libdaos.Buffer: 24, libdaos.BufferList: 16, libdaos.Extent: 16, libdaos.Value: 64,
        libdaos.KeyDescription: 16, libdaos.Anchor: 120, libdaos.ObjectId: 16, libdaos.Event: 176,
    }  # fmt: skip
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes


def test_closing_does_not_wait_for_calls_that_were_not_begun(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daos_client, "CLOSE_TIMEOUT_S", 0.1)
    store, calls = open_store()
    client = store._client
    calls.held.add("tx_open")
    handle = ctypes.c_uint64()

    def begin(event: int) -> int:
        begun: int = client.calls.tx_open(client._container, ctypes.byref(handle), 0, event)
        return begun

    def begin_many() -> None:
        with suppress(Unavailable):  # too many wait
            for _ in range(2 * (daos_client.CALLS_MAX + daos_client.WAITING_MAX)):
                client.begin(begin)

    begin_many()
    while calls.held_count() < daos_client.CALLS_MAX:
        time.sleep(0.001)
    begin_many()
    assert client._queue.full()
    closer = threading.Thread(target=client.close, daemon=True)
    closer.start()
    closer.join(30)
    assert not closer.is_alive()
