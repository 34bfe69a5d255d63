"""Every rule of the shared store contract, for every store: its log."""

from __future__ import annotations

import contextlib
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.stores.shared_store import (
    SharedStore,
    StoreTimeout,
    TrimmedLog,
)
from objectcache_storage_server.testing import FaultyStore
from tests.contract.engine_suite import content
from tests.contract.stores.shared_stores import StorePlace
from tests.contract.stores.test_shared_stores import soon
from tests.unit.examples import examples

ALL = 1 << 30


def append_all(store: SharedStore, records: list[bytes], first: int = 0) -> None:
    for number, record in enumerate(records, first):
        assert store.append(number, record, soon()), number


def numbered(count: int) -> list[bytes]:
    return [f"record {number}".encode() for number in range(count)]


def test_records_are_read_in_order_by_every_handle(place: StorePlace) -> None:
    one, other = place.open(), place.open()
    assert other.read_log(0, ALL, soon()) == []
    assert other.log_end(0, soon()) == 0
    append_all(one, numbered(12))
    assert other.log_end(0, soon()) == 12
    assert other.log_end(7, soon()) == 12
    assert other.log_end(12, soon()) == 12
    assert other.read_log(0, ALL, soon()) == numbered(12)
    assert other.read_log(9, ALL, soon()) == numbered(12)[9:]
    assert other.read_log(12, ALL, soon()) == []
    append_all(other, [b"record 12"], 12)
    assert one.read_log(11, ALL, soon()) == [b"record 11", b"record 12"]


def test_a_read_of_the_log_ends_at_its_limit_but_has_a_record(place: StorePlace) -> None:
    store = place.open()
    records = [content(number, 1000) for number in range(10)]
    append_all(store, records)
    assert store.read_log(2, 1, soon()) == records[2:3]
    for limit_bytes in (1000, 2500, 3000, 9999):
        found = store.read_log(0, limit_bytes, soon())
        assert found == records[: len(found)]
        assert 1000 <= sum(map(len, found)) <= limit_bytes
    position = 0
    while found := store.read_log(position, 3500, soon()):
        assert found == records[position : position + len(found)]
        position += len(found)
    assert position == 10


def test_a_number_that_was_used_is_another_s_also_for_one_s_own_record(place: StorePlace) -> None:
    one, other = place.open(), place.open()
    append_all(one, numbered(3))
    for number in range(3):
        assert not other.append(number, b"other", soon())
        assert not one.append(number, f"record {number}".encode(), soon())
    assert one.read_log(0, ALL, soon()) == numbered(3)
    assert one.log_end(0, soon()) == 3


def test_a_number_that_was_used_and_trimmed_is_never_given_out_again(place: StorePlace) -> None:
    stale, one = place.open(), place.open()
    append_all(stale, numbered(2))
    append_all(one, numbered(40)[2:], 2)
    one.trim_log(40, soon())
    for store in (stale, one, place.open()):
        assert store.log_end(0, soon()) == 40
        for number in (0, 2, 20, 39):
            assert not store.append(number, b"stale", soon()), number
    append_all(stale, [b"record 40"], 40)
    assert one.read_log(40, ALL, soon()) == [b"record 40"]
    assert one.log_end(2, soon()) == 41


def test_what_was_trimmed_is_said_to_be_and_what_was_not_is_read(place: StorePlace) -> None:
    one, other = place.open(), place.open()
    append_all(one, numbered(30))
    one.trim_log(20, soon())
    one.trim_log(10, soon())  # less than before
    for store in (one, other, place.open()):
        assert store.read_log(20, ALL, soon()) == numbered(30)[20:]
        assert store.log_end(0, soon()) == 30
        first = 0
        while first < 20:
            try:
                found = store.read_log(first, ALL, soon())
            except TrimmedLog as trimmed:
                before, first = first, trimmed.first
            else:
                assert found == numbered(30)[first:]
                break
            assert before < first <= 20
    append_all(other, [b"record 30"], 30)
    other.trim_log(31, soon())
    assert one.read_log(31, ALL, soon()) == []
    assert one.log_end(20, soon()) == 31


def test_one_of_those_who_race_for_a_number_has_it(place: StorePlace) -> None:
    handles = [place.open() for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        for number in range(examples(5)):
            barrier = threading.Barrier(8)

            def race(
                racer: int, number: int = number, barrier: threading.Barrier = barrier
            ) -> bool:
                barrier.wait()
                return handles[racer % 4].append(number, f"{number} {racer}".encode(), soon())

            won = list(threads.map(race, range(8)))
            assert won.count(True) == 1, number
            winner = f"{number} {won.index(True)}".encode()
            assert all(handle.read_log(number, ALL, soon()) == [winner] for handle in handles)


def test_a_record_that_the_one_before_is_missing_for_is_not_appended(place: StorePlace) -> None:
    one, other = place.open(), place.open()
    for end in (0, 2):
        append_all(one, numbered(end)[one.log_end(0, soon()) :], one.log_end(0, soon()))
        for store in (one, other):
            with contextlib.suppress(Unavailable):
                assert not store.append(end + 1, b"behind a hole", soon())
            assert store.log_end(0, soon()) == end
    append_all(other, [b"record 2", b"record 3"], 2)
    assert one.read_log(0, ALL, soon()) == numbered(4)


def test_writers_that_race_leave_no_hole_and_lose_no_record(place: StorePlace) -> None:
    """Some are slow, so that others are far ahead of them when they try."""
    handles = [place.open() for _ in range(4)]
    each = examples(5)
    acknowledged: dict[int, bytes] = {}

    def write(writer: int) -> None:
        store, pace = handles[writer % 4], random.Random(writer)
        number = 0
        for count in range(each):
            record = f"{writer} {count}".encode()
            if pace.random() < 0.3:
                number = store.log_end(number, soon())
            while not store.append(number, record, soon()):
                number += 1
            assert acknowledged.setdefault(number, record) is record, number
            number += 1

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert sorted(acknowledged) == list(range(8 * each))
    expected = [acknowledged[number] for number in range(8 * each)]
    assert all(handle.read_log(0, ALL, soon()) == expected for handle in handles)


def test_trimming_beside_writers_gives_no_number_out_twice(place: StorePlace) -> None:
    """A record that is trimmed before its writer has looked may be his or another's: he is told
    that nobody knows, and tries another number.
    """
    handles, each = [place.open() for _ in range(3)], examples(15)
    seen: dict[int, bytes] = {}
    unknown: set[int] = set()
    is_done = threading.Event()

    def is_stored(store: SharedStore, number: int, record: bytes) -> bool:
        try:
            return store.append(number, record, soon())
        except StoreTimeout:
            unknown.add(number)
            return False

    def write(writer: int) -> None:
        number = 0
        for count in range(each):
            record = f"{writer} {count}".encode()
            while not is_stored(handles[writer], number, record):
                number = max(number, handles[writer].log_end(number, soon()))
            assert seen.setdefault(number, record) is record, number

    def trim() -> None:
        while not is_done.is_set():
            handles[2].trim_log(max(handles[2].log_end(0, soon()) - 2, 0), soon())

    trimmer = threading.Thread(target=trim)
    trimmer.start()
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(write, range(2)))
    finally:
        is_done.set()
        trimmer.join()
    end = handles[0].log_end(0, soon())
    assert len(seen) == 2 * each
    assert set(range(end)) - seen.keys() <= unknown


def test_what_became_of_an_append_that_timed_out_is_read(place: StorePlace) -> None:
    way, other = FaultyStore(place.open()), place.open()
    way.time_out("append", is_carried_out=True)
    with pytest.raises(StoreTimeout):
        way.append(0, b"mine", soon())
    assert not way.append(0, b"mine", soon())
    assert other.read_log(0, ALL, soon()) == way.read_log(0, ALL, soon()) == [b"mine"]
    way.time_out("append", is_carried_out=False)
    with pytest.raises(StoreTimeout):
        way.append(1, b"never", soon())
    assert way.read_log(1, ALL, soon()) == []
    append_all(other, [b"other"], 1)
    assert not way.append(1, b"never", soon())
    way.close()


def test_an_append_that_arrives_late_does_not_take_a_number_that_was_trimmed(
    place: StorePlace,
) -> None:
    way, other = FaultyStore(place.open()), place.open()
    way.hold(keep_late_calls=True)
    with pytest.raises(StoreTimeout):
        way.append(0, b"late", 0.0)
    append_all(other, numbered(5))
    other.trim_log(5, soon())
    way.release()
    assert other.log_end(0, soon()) == 5
    assert other.read_log(5, ALL, soon()) == []
    assert way.append(5, b"record 5", soon())
    assert other.read_log(5, ALL, soon()) == [b"record 5"]
    way.close()


def test_a_record_has_a_byte_and_up_to_the_limit(place: StorePlace) -> None:
    one, other = place.open(), place.open()
    limit_bytes = one.capabilities.record_bytes_max
    records = [content("largest", limit_bytes), b"1", content("again", limit_bytes), b"2"]
    append_all(one, records)
    found: list[bytes] = []
    while more := other.read_log(len(found), limit_bytes, soon()):
        found += more
    assert found == records
    for size_bytes in (0, limit_bytes + 1):
        with pytest.raises(ValueError, match=f"{size_bytes} bytes"):
            one.append(4, bytes(size_bytes), soon())
    assert one.log_end(0, soon()) == 4


def test_waiting_for_a_record_ends_when_it_is_there_or_the_time_is_up(place: StorePlace) -> None:
    one, other = place.open(), place.open()
    other.wait_for_record(0, 0.01)
    append_all(one, numbered(1))
    other.log_end(0, soon())
    other.wait_for_record(1, 0.0)
    if not other.capabilities.has_bell:
        return
    other.wait_for_record(0, 3600.0)  # which is there
    waiter = threading.Thread(target=other.wait_for_record, args=(1, 3600.0))
    waiter.start()
    append_all(one, [b"record 1"], 1)
    waiter.join()
