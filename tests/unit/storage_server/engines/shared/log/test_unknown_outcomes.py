"""Appends whose outcome is not known: they count once or not at all, and nothing overtakes them."""

from __future__ import annotations

import time

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.shared_catalog import UnknownOutcome
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from objectcache_storage_server.engines.stores.shared_store import StoreTimeout
from tests.unit.storage_server.engines.shared.catalogs import Server, soon
from tests.unit.storage_server.engines.shared.log.test_racing_changes import count_up


def count_of(server: Server) -> bytes | None:
    server.catalog.follow(soon())
    with server.catalog.reading() as view:
        return view.document("count")


@pytest.mark.parametrize("is_carried_out", [True, False])
@pytest.mark.parametrize("times", [1, 3])
def test_a_record_whose_append_timed_out_is_stored_once(
    one: Server, other: Server, state: MemoryStoreState, is_carried_out: bool, times: int
) -> None:
    before = state.end
    one.store.time_out("append", is_carried_out=is_carried_out, count=times)
    assert one.change(count_up) == 1
    assert state.end == before + 1
    assert count_of(other) == count_of(one) == b"1"
    assert one.change(count_up) == 2


def test_a_record_that_timed_out_and_lost_is_judged_again(
    one: Server, other: Server, state: MemoryStoreState
) -> None:
    other_counts = iter([True])

    def act(change: ReplayedChange) -> int:
        if next(other_counts, False):
            other.change(count_up)
        return count_up(change)

    before = state.end
    one.store.time_out("append", is_carried_out=False)
    assert one.change(act) == 2
    assert state.end == before + 2
    assert count_of(other) == b"2"


def left_unknown(server: Server) -> UnknownOutcome:
    """Count up while the store is held; what a busy machine had not begun at the deadline, and so
    has not changed anything, is tried with a later one.
    """
    for wait_s in (0.1, 2.0, 30.0):
        try:
            server.catalog.change(count_up, time.monotonic() + wait_s)
        except UnknownOutcome as error:
            return error
        except StoreTimeout:
            continue
    raise AssertionError("nothing was appended")


def test_a_record_that_is_carried_out_late_counts(one: Server, other: Server) -> None:
    one.store.hold(keep_late_calls=True)
    assert "may have been stored" in str(left_unknown(one))
    assert count_of(other) is None
    with pytest.raises(StoreTimeout) as refused:  # nothing overtakes the first
        one.catalog.change(count_up, time.monotonic() + 0.1)
    assert not isinstance(refused.value, UnknownOutcome)
    one.store.release()
    assert count_of(other) == b"1"
    assert one.change(count_up) == 2
    assert count_of(one) == b"2"
    assert other.change(count_up) == 3


def test_a_late_record_whose_number_is_taken_does_not_count(one: Server, other: Server) -> None:
    one.store.hold(keep_late_calls=True)
    left_unknown(one)
    other.change(lambda change: change.put_document("other", b""))
    one.store.release()
    assert count_of(one) is None
    assert one.change(count_up) == 1
    assert count_of(other) == b"1"


def test_a_record_that_was_told_to_be_unknown_may_be_stored_by_the_next_change(
    one: Server, state: MemoryStoreState
) -> None:
    before = state.end
    one.store.hold()
    left_unknown(one)
    one.store.release()
    assert one.change(count_up) == 2
    assert state.end == before + 2


def test_a_change_of_nothing_is_never_unknown(one: Server) -> None:
    one.store.hold()
    with pytest.raises(StoreTimeout) as refused:
        one.catalog.change(lambda change: change.document("none"), time.monotonic() + 0.1)
    assert not isinstance(refused.value, UnknownOutcome)


def test_what_the_store_refuses_has_changed_nothing(one: Server, state: MemoryStoreState) -> None:
    state.exists = False
    with pytest.raises(Unavailable) as refused:
        one.change(count_up)
    assert not isinstance(refused.value, UnknownOutcome)
    with one.catalog.reading() as view:  # what is known is told
        assert view.document("count") is None
    with pytest.raises(Unavailable):
        one.catalog.follow(soon())
    state.exists = True
    assert one.change(count_up) == 1


def test_a_store_that_fails_every_third_call_loses_nothing(one: Server, other: Server) -> None:
    for server in (one, other):
        server.store.fault_rate = 0.3
    made = unknown = 0
    for round_ in range(60):
        server = (one, other)[round_ % 2]
        try:
            server.catalog.change(count_up, time.monotonic() + 5)
            made += 1
        except UnknownOutcome:
            unknown += 1
        except Unavailable:
            pass
    for server in (one, other):
        server.store.fault_rate = 0.0
    found = int(count_of(one) or b"0")
    assert made <= found <= made + unknown
    assert one.contents() == other.contents()


def test_of_a_writer_that_was_forgotten_meanwhile_nobody_knows(one: Server, other: Server) -> None:
    writer = one.catalog.writer
    is_first = iter([True])

    def act(change: ReplayedChange) -> int:
        if next(is_first, False):
            other.change(lambda change: change.fence(writer))
            other.change(lambda change: change.forget_writer(writer))
        return count_up(change)

    one.store.time_out("append", is_carried_out=False)
    with pytest.raises(UnknownOutcome):
        one.change(act)
    assert one.change(count_up) == 1  # under another number
    assert one.new_writer() != writer
