"""Changes of several servers and threads at once: each is judged at the log's end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import pytest

from objectcache_schemas.errors import Conflict, InvalidRequest, ObjectCacheError, StorageFull
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.version_rows import new_rows
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.storage_server.engines.shared.catalogs import Server, document_names, soon, until
from tests.unit.storage_server.engines.shared.held_appends import HeldAppends
from tests.unit.storage_server.engines.shared.log.conftest import Opened

T = TypeVar("T")


def count_up(change: ReplayedChange) -> int:
    """One more, in a document."""
    count = int(change.document("count") or b"0") + 1
    change.put_document("count", str(count).encode())
    return count


def put_if_absent(server: Server, bucket: int, key: str) -> bool:
    """Whether this server was first."""
    versions, shapes = server.staged(bucket, [key])

    def act(change: ReplayedChange) -> None:
        if change.versions(bucket, [key]):
            raise Conflict("there already")
        change.add(new_rows(versions), shapes)

    try:
        server.change(act)
    except Conflict:
        return False
    return True


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What they return, each in a thread."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def test_no_change_of_four_servers_is_lost(opened: Opened) -> None:
    servers = [opened(f"server{n}") for n in range(4)]

    def count(server: Server) -> list[int]:
        return [server.change(count_up) for _ in range(25)]

    counts = at_once([partial(count, server) for server in servers * 2])
    flat = [number for each in counts for number in each]
    assert sorted(flat) == list(range(1, 201))
    contents = [server.contents() for server in servers]
    assert all(each == contents[0] for each in contents)


def test_of_four_servers_that_put_one_key_one_is_first(opened: Opened) -> None:
    servers = [opened(f"server{n}") for n in range(4)]
    bucket = servers[0].make_bucket()
    for server in servers:
        server.catalog.follow(soon())
    for round_ in range(10):
        key = f"key{round_}"
        was_first = at_once([partial(put_if_absent, server, bucket, key) for server in servers])
        assert was_first.count(True) == 1
    assert servers[3].contents() == servers[0].contents()
    fresh = opened("fresh")
    assert fresh.contents()[3] == servers[0].contents()[3]


def test_changes_that_wait_at_once_share_a_record(one: Server, state: MemoryStoreState) -> None:
    held, before = HeldAppends(one), state.end
    with ThreadPoolExecutor(20) as threads:
        counts = [threads.submit(one.change, count_up)]
        until(lambda: held.waiting == 1)
        counts += [
            held.queue(threads, partial(one.change, count_up), place) for place in range(1, 20)
        ]
        held.let(2)
        assert sorted(count.result() for count in counts) == list(range(1, 21))
    assert state.end == before + 2


def test_what_is_wrong_with_one_change_of_a_record_concerns_no_other(
    one: Server, state: MemoryStoreState
) -> None:
    bucket = one.make_bucket()
    limit = one.store.capabilities.record_bytes_max
    one.store.delay_s = 0.05

    def fail(change: ReplayedChange) -> None:
        change.put_document("wrong", b"")
        raise Conflict("on purpose")

    def call(act: Callable[[ReplayedChange], object]) -> object:
        try:
            return one.change(act)
        except ObjectCacheError as error:
            return type(error)

    half = bytes(limit // 2 + 100)
    acts: list[Callable[[ReplayedChange], object]] = [
        count_up,
        fail,
        lambda change: change.put_document("half", half),
        lambda change: change.put_document("too large", bytes(limit)),
        lambda change: change.put_document("other half", half),
        count_up,
        lambda change: change.bucket("none"),
    ]
    found = at_once([partial(call, act) for act in acts])
    kinds = [each if isinstance(each, type) else "made" for each in found]
    assert kinds[:6] == ["made", Conflict, "made", InvalidRequest, "made", "made"]
    assert kinds[6] != "made"
    one.store.delay_s = 0.0
    with one.catalog.reading() as view:
        assert document_names(view) == ["count", "half", "other half"]
        assert view.document("count") == b"2"
    assert one.keys(bucket) == []


def test_a_large_change_is_made_beside_small_ones_that_are_always_quicker(
    one: Server, other: Server
) -> None:
    is_over = threading.Event()
    tried: set[int] = set()

    def make_small_ones() -> None:
        while not is_over.is_set():
            other.change(count_up)

    def large(number: int, change: ReplayedChange) -> None:
        if number in tried:
            time.sleep(0.03)  # as a large one takes to be judged, while others may append
        else:
            tried.add(number)
            end = one.state.end
            until(lambda: one.state.end > end + 3)
        change.put_document(f"large{number}", b"")

    with ThreadPoolExecutor(2) as threads:
        small = [threads.submit(make_small_ones) for _ in range(2)]
        try:
            for number in range(3):
                one.change(partial(large, number))
        finally:
            is_over.set()
        for each in small:
            each.result()
    assert one.catalog.lost_races >= 3
    with one.catalog.reading() as view:
        assert document_names(view) == ["count", "large0", "large1", "large2"]


def test_a_full_store_takes_the_small_changes_of_a_group(
    one: Server, state: MemoryStoreState
) -> None:
    state.capacity_bytes = state.record_bytes
    state.reserve_bytes = 100_000
    one.store.delay_s = 0.05

    def call(size_bytes: int) -> object:
        try:
            return one.change(
                lambda change: change.put_document(str(size_bytes), bytes(size_bytes))
            )
        except StorageFull:
            return StorageFull

    sizes = [10, 200_000, 20, 300_000, 30]
    found = at_once([partial(call, size) for size in sizes])
    assert found == [None, StorageFull, None, StorageFull, None]


def test_a_change_that_waits_too_long_changes_nothing(one: Server) -> None:
    one.store.hold()
    begun = threading.Event()

    def first(change: ReplayedChange) -> int:
        begun.set()
        return count_up(change)

    with ThreadPoolExecutor(1) as threads:
        appended = threads.submit(one.change, first)
        assert begun.wait(60)
        with pytest.raises(ObjectCacheError, match="nothing was changed"):
            one.catalog.change(count_up, time.monotonic() + 0.05)
        one.store.release()
        assert appended.result() == 1
    assert one.change(count_up) == 2


def test_strict_reads_end_beside_a_server_that_appends_all_the_time(
    one: Server, other: Server
) -> None:
    is_over = threading.Event()

    def append() -> None:
        while not is_over.is_set():
            other.change(count_up)

    with ThreadPoolExecutor(2) as threads:
        appending = [threads.submit(append) for _ in range(2)]
        try:
            for _ in range(100):
                known = other.catalog.change(lambda change: change.document("count"), soon())
                one.catalog.follow(soon())
                with one.catalog.reading() as view:
                    assert int(view.document("count") or 0) >= int(known or 0)
        finally:
            is_over.set()
        for each in appending:
            each.result()
