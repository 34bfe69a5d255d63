"""Every rule of the shared store contract, for every store: objects. The log's are beside it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.stores.shared_store import (
    NAME_BYTES_MAX,
    LostObject,
    ObjectRead,
    SharedStore,
    StoreTimeout,
)
from objectcache_storage_server.testing import PassingStore
from tests.contract.engine_suite import content
from tests.contract.stores.shared_stores import StorePlace

ALLOWED_NAMES = [
    "a",
    "0123456789-abcdefghijklmnopqrstuvwxyz_ABCDEFGHIJKLMNOPQRSTUVWXYZ.0",
    "w7/e12/r0001",
    "w7/e12/..r",
    "..w/.e",
    "n" * NAME_BYTES_MAX,
    "/".join(["part"] * 40),
]
REFUSED_NAMES = [
    "", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a b", "a\n", "ä", "a\\b",
    "a\0b", "n" * (NAME_BYTES_MAX + 1),
]  # fmt: skip


def soon() -> float:
    """A deadline that a store which works meets."""
    return time.monotonic() + 60


def put(store: SharedStore, name: str, data: bytes) -> None:
    store.put(name, [memoryview(data)], soon())


def read(store: SharedStore, name: str, offset_bytes: int, length_bytes: int) -> bytes:
    landing = bytearray(length_bytes)
    store.begin_reads([ObjectRead(name, offset_bytes, memoryview(landing))], soon()).result()
    return bytes(landing)


def names(store: SharedStore, prefix: str) -> dict[str, int]:
    found = list(store.list_objects(prefix, soon()))
    assert len(found) == len(dict(found)), "an object is listed twice"
    return dict(found)


def test_an_object_is_its_parts_one_after_the_other(place: StorePlace) -> None:
    writer, reader = place.open(), place.open()
    data = content("object", 300_001)
    parts = [bytearray(data[:1]), bytearray(data[1:200_000]), bytearray(data[200_000:])]
    writer.put("w/1", [memoryview(part) for part in parts], soon())
    for part in parts:
        part[:] = bytes(len(part))  # the caller's again
    assert reader.get("w/1", soon()) == data
    assert read(reader, "w/1", 199_999, 2) == data[199_999:200_001]


def test_a_batch_of_ranges_fills_every_landing(place: StorePlace) -> None:
    writer, reader = place.open(), place.open()
    contents = {f"w/{i}": content(i, 256 * 1024) for i in range(8)}
    for name, data in contents.items():
        put(writer, name, data)
    # Neighbours, gaps, twice the same, ends, out of order, and lengths of every kind.
    ranges = [(65536, 65536), (0, 65536), (131072, 1), (200_000, 62_144), (0, 65536), (5, 4091)]
    buffer = bytearray(len(contents) * sum(length for _, length in ranges))
    reads, position = [], 0
    for offset_bytes, length_bytes in ranges:
        for name in contents:
            landing = memoryview(buffer)[position : position + length_bytes]
            reads.append(ObjectRead(name, offset_bytes, landing))
            position += length_bytes
    reader.begin_reads(reads, soon()).result()
    for name, offset_bytes, landing in reads:
        assert landing == contents[name][offset_bytes : offset_bytes + len(landing)], name


def test_a_batch_of_nothing_ends_well(place: StorePlace) -> None:
    place.open().begin_reads([], soon()).result()


def test_batches_may_be_under_way_at_once(place: StorePlace) -> None:
    writer, reader = place.open(), place.open()
    data = content("many", 1 << 20)
    put(writer, "w/1", data)
    landings = [bytearray(16384) for _ in range(64)]
    batches = [
        reader.begin_reads([ObjectRead("w/1", 16384 * i, memoryview(landing))], soon())
        for i, landing in enumerate(landings)
    ]
    for batch in batches:
        batch.result()
    assert b"".join(landings) == data


def test_threads_may_use_one_handle(place: StorePlace) -> None:
    store = place.open()

    def use(number: int) -> None:
        data = content(number, 10_000)
        put(store, f"w/{number}", data)
        assert read(store, f"w/{number}", 100, 9000) == data[100:9100]
        store.delete([f"w/{number}"], soon())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, range(40)))
    assert names(store, "") == {}


def test_what_is_not_there_or_shorter_is_lost_and_says_whose(place: StorePlace) -> None:
    store = place.open()
    put(store, "w/short", b"short")
    for name, offset_bytes, length_bytes in [("w/no", 0, 1), ("w/short", 0, 6), ("w/short", 9, 1)]:
        with pytest.raises(LostObject) as caught:
            read(store, name, offset_bytes, length_bytes)
        assert caught.value.name == name
    with pytest.raises(LostObject, match="w/no"):
        store.get("w/no", soon())


def test_one_lost_object_fails_its_batch(place: StorePlace) -> None:
    store = place.open()
    put(store, "w/1", b"there")
    reads = [ObjectRead(name, 0, memoryview(bytearray(5))) for name in ("w/1", "w/2", "w/1")]
    with pytest.raises(LostObject, match="w/2"):
        store.begin_reads(reads, soon()).result()


def test_a_read_that_was_cancelled_in_time_never_lands(place: StorePlace) -> None:
    store = place.open()
    put(store, "w/1", b"\1" * 65536)
    landings = [bytearray(65536) for _ in range(100)]
    batches = [
        store.begin_reads([ObjectRead("w/1", 0, memoryview(landing))], soon())
        for landing in landings
    ]
    cancelled = [batch.cancel() for batch in batches]
    for batch, was_cancelled in zip(batches, cancelled, strict=True):
        if not was_cancelled:
            batch.result()
    store.close()  # which ends what was under way
    for landing, was_cancelled in zip(landings, cancelled, strict=True):
        assert landing == (bytes(65536) if was_cancelled else b"\1" * 65536)


def test_deleting_is_for_every_handle_and_may_be_repeated(place: StorePlace) -> None:
    one, other = place.open(), place.open()
    put(one, "w/1", b"one")
    put(one, "w/2", b"two")
    other.delete(["w/1", "w/1", "w/never"], soon())
    other.delete(iter(["w/1"]), soon())
    other.delete([], soon())
    with pytest.raises(LostObject):
        one.get("w/1", soon())
    assert one.get("w/2", soon()) == b"two"


def test_listing_is_by_the_beginning_of_the_name_and_without_the_log(place: StorePlace) -> None:
    writer, reader = place.open(), place.open()
    assert writer.append(0, b"record", soon())
    sizes = {"w1/a": 1, "w1/b/c": 20, "w10/a": 300, "w2": 4000, "log": 5, "log/0": 6}
    for name, size_bytes in sizes.items():
        put(writer, name, bytes(size_bytes))
    assert names(reader, "") == sizes
    assert names(reader, "w1") == {"w1/a": 1, "w1/b/c": 20, "w10/a": 300}
    assert names(reader, "w1/") == {"w1/a": 1, "w1/b/c": 20}
    assert names(reader, "w1/b/c") == {"w1/b/c": 20}
    assert names(reader, "w3") == {}


def test_more_objects_than_a_page_holds_are_listed_and_deleted(place: StorePlace) -> None:
    store = place.open()
    expected = {f"w{i % 3}/{i}": 1 for i in range(1010)}
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: put(store, name, b"x"), expected))
    assert names(store, "w") == expected
    store.delete(iter(expected), soon())
    assert names(store, "w") == {}


def test_a_name_that_is_allowed_is_kept_as_it_is(place: StorePlace) -> None:
    store = place.open()
    for name in ALLOWED_NAMES:
        put(store, name, b"named")
        assert store.get(name, soon()) == b"named"
        assert read(store, name, 1, 3) == b"ame"
        assert names(store, name[:3]) == {name: 5}
        store.delete([name], soon())
        assert names(store, "") == {}


def test_other_names_are_refused(place: StorePlace) -> None:
    store = place.open()
    for name in REFUSED_NAMES:
        with pytest.raises(ValueError, match="name"):
            put(store, name, b"named")
    assert names(store, "") == {}


def test_an_object_has_a_byte_and_up_to_the_limit(place: StorePlace) -> None:
    store = place.open()
    limit_bytes = store.capabilities.object_bytes_max
    data = content("largest", limit_bytes)
    put(store, "w/largest", data)
    put(store, "w/least", b"1")
    assert store.get("w/largest", soon()) == data
    assert read(store, "w/largest", limit_bytes - 1, 1) == data[-1:]
    for size_bytes in (0, limit_bytes + 1):
        with pytest.raises(ValueError, match=f"{size_bytes} bytes"):
            put(store, "w/refused", bytes(size_bytes))
    assert names(store, "w/") == {"w/largest": limit_bytes, "w/least": 1}


def test_after_its_deadline_nothing_is_done(place: StorePlace) -> None:
    store = place.open()
    put(store, "w/1", b"there")
    assert store.append(0, b"record", soon())
    past_s = time.monotonic() - 1
    landing = bytearray(5)
    batch = store.begin_reads([ObjectRead("w/1", 0, memoryview(landing))], past_s)
    for call in (
        batch.result,
        lambda: store.put("w/2", [memoryview(b"late")], past_s),
        lambda: store.get("w/1", past_s),
        lambda: list(store.list_objects("", past_s)),
        lambda: store.delete(["w/1"], past_s),
        lambda: store.append(1, b"late", past_s),
        lambda: store.read_log(0, 1 << 20, past_s),
        lambda: store.log_end(0, past_s),
        lambda: store.trim_log(1, past_s),
    ):
        with pytest.raises(StoreTimeout):
            call()
    assert landing == bytes(5)
    assert names(store, "") == {"w/1": 5}
    assert store.read_log(0, 1 << 20, soon()) == [b"record"]


def test_a_store_that_is_not_there_has_lost_nothing(place: StorePlace) -> None:
    store = place.open()
    put(store, "w/1", b"there")
    assert store.append(0, b"record", soon())
    place.remove()
    for call in (
        store.begin_reads([ObjectRead("w/1", 0, memoryview(bytearray(5)))], soon()).result,
        lambda: store.get("w/1", soon()),
        lambda: store.get("w/never", soon()),
        lambda: put(store, "w/2", b"new"),
        lambda: list(store.list_objects("", soon())),
        lambda: store.delete(["w/1"], soon()),
        lambda: store.append(1, b"new", soon()),
        lambda: store.read_log(0, 1 << 20, soon()),
        lambda: store.log_end(0, soon()),
    ):
        with pytest.raises(Unavailable):
            call()


def test_closing_wakes_who_waits_and_may_be_repeated(place: StorePlace) -> None:
    store = place.open()
    waiter = threading.Thread(target=store.wait_for_record, args=(0, 3600.0))
    waiter.start()
    store.close()
    waiter.join()
    store.wait_for_record(0, 3600.0)
    store.close()


def test_waits_end_when_they_are_told_to_and_others_may_begin(place: StorePlace) -> None:
    store = place.open()
    for _ in range(2):
        waiter = threading.Thread(target=store.wait_for_record, args=(0, 3600.0))
        waiter.start()
        while waiter.is_alive():  # it may not have begun to wait
            store.end_waits()
            waiter.join(0.01)
    assert store.append(0, b"record", soon())


def test_a_passing_store_has_every_method_of_the_contract() -> None:
    methods = {name for name in vars(SharedStore) if not name.startswith("_")}
    assert methods - {"capabilities", "was_made"} <= vars(PassingStore).keys()
