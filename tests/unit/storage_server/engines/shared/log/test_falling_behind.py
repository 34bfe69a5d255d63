"""A server that cannot follow the log says so, and how far behind it is."""

from __future__ import annotations

import re
import threading
import time

import pytest

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.index.replayed_index import ReplayedIndex
from tests.unit.storage_server.engines.shared.catalogs import Server, soon, until
from tests.unit.storage_server.engines.shared.log.conftest import Opened
from tests.unit.storage_server.engines.shared.log.test_racing_changes import count_up


def test_a_record_that_cannot_be_read_is_seen(one: Server, other: Server) -> None:
    one.store.flip_record(one.state.end + 1)
    for _ in range(5):
        other.change(count_up)
    until(lambda: not one.is_followed and (one.catalog.lag_records or 0) >= 4)
    behind_s = one.catalog.behind_s
    until(lambda: one.catalog.behind_s > behind_s + 1)
    assert other.is_followed


def test_an_index_without_room_is_seen(
    one: Server, other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_room = ReplayedIndex.take_room

    def refuse(index: ReplayedIndex, record_bytes: int) -> None:
        if index.folder.is_relative_to(one.folder):
            raise StorageFull("the index has no room")
        take_room(index, record_bytes)

    one.catalog.follow(soon())  # what the other has said of itself by now
    monkeypatch.setattr(ReplayedIndex, "take_room", refuse)
    for _ in range(5):
        other.change(count_up)
    until(lambda: not one.is_followed and one.catalog.lag_records == 5)
    monkeypatch.undo()
    until(lambda: one.is_followed and one.catalog.lag_records == 0)
    assert one.catalog.behind_s < 60


def test_a_server_that_ends_makes_its_index_again_no_further(
    one: Server, other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_log = one.store.read_log
    is_begun = threading.Event()

    def read_on(first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        other.change(count_up)  # so that the log has no end
        if first == 0:
            is_begun.set()
        return read_log(first, size_bytes_max, deadline_s)

    monkeypatch.setattr(one.store, "read_log", read_on)
    one.catalog._replay.set_damaged(IndexDamage("on purpose"))
    assert is_begun.wait(60)
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()


def test_one_look_that_fails_is_no_reason_to_ask_a_server_for_nothing(opened: Opened) -> None:
    one = opened("one", call_s_max=1.0)
    one.store.hold()
    until(lambda: not one.is_followed)
    follower = one.catalog._follower
    follower.at_end_s = time.monotonic() + 3600
    assert one.catalog.store_failure == ""
    follower.at_end_s = time.monotonic() - 3600
    assert re.search(r"cannot be followed, for 36\d\d s so far", one.catalog.store_failure)
    one.store.release()
    until(lambda: not one.catalog.store_failure)


def test_a_server_whose_records_are_refused_says_so(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = opened("refused", heartbeat_s=0.05)
    assert server.catalog.store_failure == ""
    until(lambda: server.catalog.lag_records == 0)

    def refuse(number: int, record: bytes, deadline_s: float) -> bool:
        raise Unavailable(f"the log has no record {number - 1} for {number} to follow")

    with monkeypatch.context() as patched:
        patched.setattr(server.store.inner, "append", refuse)
        until(lambda: "takes no record" in server.catalog.store_failure)
        assert server.catalog.lag_records is None  # nobody knows what the log lacks
        assert server.is_followed
    until(lambda: server.catalog.store_failure == "" and server.catalog.lag_records == 0)


def test_a_server_that_cannot_ask_does_not_say_how_far_behind_it_is(one: Server) -> None:
    until(lambda: one.catalog.lag_records == 0)
    one.store.hold()
    until(lambda: one.catalog.lag_records is None)
    one.store.release()
    until(lambda: one.catalog.lag_records == 0)


def test_a_defect_while_waiting_for_a_record_ends_nothing(
    opened: Opened, other: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = opened("late")

    def fail(number: int, timeout_s: float) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(server.store, "wait_for_record", fail)
        until(lambda: not server.is_followed)
    other.change(count_up)
    until(lambda: server.is_followed and server.catalog.lag_records == 0)
    with server.catalog.reading() as view:
        assert view.document("count") == b"1"
    server.catalog.follow(soon())


def test_closing_ends_a_wait_for_the_bell(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    server = opened("closing")
    wait, is_waiting = server.store.wait_for_record, threading.Event()

    def wait_long(number: int, timeout_s: float) -> None:
        is_waiting.set()
        wait(number, 3600.0)

    monkeypatch.setattr(server.store, "wait_for_record", wait_long)
    assert is_waiting.wait(60)
    server.catalog.close()  # or the test's time is up
