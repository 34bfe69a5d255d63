"""Changes in line: who leads, who leaves before its change is over, and what is judged again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from objectcache_schemas.errors import Conflict, StorageFull
from objectcache_storage_server.engines.shared.index.apply_record import Touched
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.log import make_record
from objectcache_storage_server.engines.shared.shared_catalog import UnknownOutcome
from tests.unit.storage_server.engines.shared.catalogs import Server, soon, until
from tests.unit.storage_server.engines.shared.held_appends import (
    TOO_LARGE_BYTES,
    HeldAppends,
)
from tests.unit.storage_server.engines.shared.log.test_racing_changes import count_up


class CallToLead(threading.Event):
    """What a change in line waits for, up to its deadline, which passes when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_deadline_past = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        until(lambda: self.is_set() or self.is_deadline_past.is_set())
        return self.is_set()


def call_of(held: HeldAppends, place: int) -> CallToLead:
    """Of the change at this place in line."""
    called = held.in_line(place).called
    assert isinstance(called, CallToLead)
    return called


def before_others() -> float:
    """A deadline before that of a change which began a moment ago."""
    return time.monotonic() + 30


def put_large(change: ReplayedChange) -> None:
    change.put_document("large", bytes(TOO_LARGE_BYTES))


def test_a_change_whose_caller_left_is_not_called_to_lead(
    one: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_record, "Event", CallToLead)
    held = HeldAppends(one)
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(one.change, count_up)
        until(lambda: held.waiting == 1)
        leader = held.queue(threads, lambda: one.change(put_large), 1)
        hasty = held.queue(threads, lambda: one.catalog.change(count_up, before_others()), 2)
        hastys_call = call_of(held, 2)
        held.let(1)
        assert first.result() == 1
        until(lambda: held.waiting == 2)  # of the leader and of the hasty one
        hastys_call.is_deadline_past.set()
        with pytest.raises(UnknownOutcome):
            hasty.result()
        held.let(100)
        with pytest.raises(StorageFull):
            leader.result()
        last = threads.submit(one.catalog.change, count_up, soon())
        assert last.result() == 2


def test_what_was_refused_because_of_a_change_that_was_not_stored_is_judged_again(
    one: Server,
) -> None:
    held = HeldAppends(one)

    def put_unless_large(change: ReplayedChange) -> str:
        change.put_document("small", b"")
        if change.document("large") is not None:
            raise Conflict("there is a large one")
        return "stored"

    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(one.change, count_up)
        until(lambda: held.waiting == 1)
        deadline_s = soon()
        calls: list[Callable[[ReplayedChange], object]] = [put_large, put_unless_large, count_up]
        futures = []
        for place, act in enumerate(calls, 1):
            # The last leads; the others are judged after it, in their order.
            def call(act: Callable[[ReplayedChange], object] = act, place: int = place) -> object:
                return one.catalog.change(act, deadline_s + place)

            futures.append(held.queue(threads, call, place))
        held.let(100)
        assert first.result() == 1
        with pytest.raises(StorageFull):
            futures[0].result()
        assert futures[1].result() == "stored"
        assert futures[2].result() == 2


def test_a_call_ends_at_its_own_deadline_whoever_waits_beside_it(
    one: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_record, "Event", CallToLead)
    held = HeldAppends(one)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(one.change, count_up)
        until(lambda: held.waiting == 1)
        hasty = held.queue(threads, lambda: one.catalog.change(count_up, before_others()), 1)
        hastys_call = call_of(held, 1)
        patient = held.queue(threads, lambda: one.change(count_up), 2)
        try:
            held.let(1)
            until(lambda: held.waiting == 2)  # of both
            hastys_call.is_deadline_past.set()
            with pytest.raises(UnknownOutcome):
                hasty.result(30)
            assert not patient.done()
        finally:
            held.let(100)
        assert (first.result(), patient.result()) == (1, 2)


def test_an_index_that_is_made_again_has_the_change_that_was_under_way(one: Server) -> None:
    held = HeldAppends(one)
    replay = one.catalog._replay
    reached_end = threading.Event()
    ends: list[int] = []
    read_log, on_applied = one.store.inner.read_log, replay._on_applied

    def read(first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        found = read_log(first, size_bytes_max, deadline_s)
        if not found and replay.is_damaged:  # by the index that takes the place
            reached_end.set()
        return found

    def note(touched: Touched) -> None:
        if touched.is_everything:
            ends.append(replay.end)
        on_applied(touched)

    one.store.inner.read_log = read  # type: ignore[method-assign]
    replay._on_applied = note
    with ThreadPoolExecutor(1) as threads:
        change = threads.submit(one.change, count_up)
        until(lambda: held.waiting == 1)
        replay.set_damaged(IndexDamage("on purpose"))
        assert reached_end.wait(60)
        held.let(100)
        assert change.result() == 1
    until(lambda: bool(ends))
    assert ends == [one.state.end]
