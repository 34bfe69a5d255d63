"""Writers: who lives, who is taken for dead, and who looks after the store."""

from __future__ import annotations

import pytest

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.shared.index.apply_record import Touched
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.version_rows import new_rows
from objectcache_storage_server.engines.shared.log.turns import (
    RUN_MAX,
    TURN_S_MAX,
    YIELDS_FOR,
    AppendTurns,
)
from objectcache_storage_server.engines.shared.log.writers import writer_watch
from objectcache_storage_server.engines.shared.log.writers.writer_watch import (
    STEP_S_MAX,
    WriterWatch,
)
from objectcache_storage_server.engines.stores.memory_store import MemoryStoreState
from tests.unit.storage_server.engines.shared.catalogs import Server, soon, until
from tests.unit.storage_server.engines.shared.log.conftest import Opened
from tests.unit.storage_server.engines.shared.log.test_racing_changes import count_up


def test_a_server_is_entered_in_the_log_when_it_starts(one: Server, other: Server) -> None:
    with other.catalog.reading() as view:
        assert {one.catalog.writer, other.catalog.writer} == view.writers().keys()


def test_a_server_that_cannot_append_reads_and_is_entered_later(
    one: Server, opened: Opened, state: MemoryStoreState
) -> None:
    one.change(count_up)
    state.capacity_bytes, state.reserve_bytes = state.record_bytes, 0
    late = opened("late", heartbeat_s=0.05)
    with late.catalog.reading() as view:
        assert view.document("count") == b"1"
    with pytest.raises(Unavailable, match="not entered"):
        _ = late.catalog.writer
    state.capacity_bytes = None
    assert late.new_writer() > 0


def test_an_idle_server_appends_heartbeats_and_a_busy_one_none(
    opened: Opened, state: MemoryStoreState
) -> None:
    idle = opened("idle", heartbeat_s=0.02)
    number = state.end
    until(lambda: state.end >= number + 3)
    idle.close()


def test_heartbeats_say_what_others_are_to_know(one: Server, other: Server) -> None:
    bucket = one.make_bucket()
    (stored, *_) = one.put(bucket, ["a"])
    extent = stored.extents[0]
    other.keys(bucket)
    before = other.state.end
    other.catalog.note_used([extent, extent._replace(number=999)])
    other.catalog.describe_server(b"address")
    until(lambda: _document(one, other.catalog.writer) == b"address")
    with one.catalog.reading() as view:
        row = view.extent(extent)
        assert row is not None
        assert row.last_used >= before
    fenced = other.catalog.writer
    one.change(lambda change: change.fence(fenced))
    until(lambda: other.new_writer() != fenced)
    until(lambda: _document(one, other.catalog.writer) == b"address")


def _document(server: Server, writer: int) -> bytes | None:
    server.catalog.follow(soon())
    with server.catalog.reading() as view:
        row = view.writer_row(writer)
    return row.document if row is not None else None


def test_a_fenced_server_that_wakes_up_appends_nothing_under_its_old_writer(
    one: Server, other: Server
) -> None:
    bucket = one.make_bucket()
    versions, shapes = one.staged(bucket, ["a"])
    writer = one.catalog.writer

    def add_after_fence(change: ReplayedChange) -> None:
        change.add(new_rows(versions), shapes)
        if change.writer == writer:  # it was stopped between judging and appending
            other.change(lambda change: change.fence(writer))

    with pytest.raises(Unavailable, match="took it for dead"):
        one.change(add_after_fence)
    assert one.keys(bucket) == []
    assert one.new_writer() != writer
    one.put(bucket, ["a"])
    assert other.keys(bucket) == ["a"]


def test_the_upkeep_lease_ends_when_its_holder_is_fenced(one: Server, other: Server) -> None:
    one.change(lambda change: change.take_upkeep())
    with pytest.raises(AssertionError, match="another's"):
        other.change(lambda change: change.take_upkeep())
    writer = one.catalog.writer
    other.change(lambda change: change.fence(writer))
    other.change(lambda change: change.take_upkeep())
    one.catalog.follow(soon())
    with one.catalog.reading() as view:
        assert view.state.upkeep_holder == other.catalog.writer


def test_listeners_are_told_what_was_changed_here_and_elsewhere(one: Server, other: Server) -> None:
    told = Touched()
    one.catalog.listen(told.add)
    other.make_bucket()
    one.change(count_up)
    until(lambda: bool(told.buckets and told.documents))
    assert (told.buckets, told.documents) == ({"bucket"}, {"count"})


def test_a_listener_that_fails_keeps_no_other_from_being_told(one: Server) -> None:
    def fail(touched: Touched) -> None:
        raise RuntimeError("on purpose")

    told = Touched()
    one.catalog.listen(fail)
    one.catalog.listen(told.add)
    one.change(count_up)
    until(lambda: bool(told.documents))


def test_silent_writers_are_seen(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_watch, "STEP_S_MAX", 0.2)  # servers may stand still together
    lively = opened("lively", heartbeat_s=0.05)
    silent = opened("silent")
    watcher = opened("watcher", heartbeat_s=0.05)
    until(lambda: watcher.catalog.silent_writers(2.0) == [silent.catalog.writer])
    assert lively.catalog.writer not in watcher.catalog.silent_writers(2.0)
    writer = silent.catalog.writer
    watcher.change(lambda change: change.fence(writer))
    until(lambda: watcher.catalog.silent_writers(0.5) == [])


def test_only_time_in_which_the_log_was_followed_counts() -> None:
    watch = WriterWatch()
    watch.saw({1: 10, 2: 11}, 100.0)
    watch.saw({1: 10, 2: 12}, 102.0)
    assert watch.silent(1.5) == [1]
    watch.saw({1: 10, 2: 12}, 1000.0)  # it slept
    assert watch.silent(2.0 + STEP_S_MAX) == []
    assert watch.silent(STEP_S_MAX) == [1]
    watch.saw({2: 12}, 1001.0)
    assert watch.silent(STEP_S_MAX) == [2]


def append_run(turns: AppendTurns, count: int, took_s: float, now_s: float) -> float:
    for _ in range(count):
        assert turns.wait_s(1, now_s) == 0
        now_s += took_s
        turns.saw(1, None, now_s)
    return now_s


def test_a_server_that_has_made_many_records_in_a_row_leaves_the_log_to_others() -> None:
    turns = AppendTurns()
    now_s = append_run(turns, RUN_MAX, 0.25 / YIELDS_FOR, 0.0)
    assert turns.wait_s(1, now_s) == pytest.approx(0.25)
    assert turns.wait_s(2, now_s) == 0
    assert turns.wait_s(1, now_s + 0.125) == pytest.approx(0.125)
    assert turns.wait_s(1, now_s + 0.25) == 0  # nobody wanted it
    now_s = append_run(turns, RUN_MAX, 0.01, now_s + 0.25)
    assert turns.wait_s(1, now_s) > 0
    turns.saw(2, None, now_s)
    assert turns.wait_s(1, now_s) == 0
    now_s = append_run(turns, RUN_MAX, 10.0, now_s)
    assert turns.wait_s(1, now_s) == TURN_S_MAX


def test_a_server_that_has_paused_by_itself_need_not_wait() -> None:
    turns = AppendTurns()
    now_s = append_run(turns, RUN_MAX, 0.01, 0.0)
    assert turns.wait_s(1, now_s + 0.01 * YIELDS_FOR) == 0
    assert turns.wait_s(1, now_s + 0.01 * YIELDS_FOR) == 0


def test_turns_are_taken_in_the_order_of_the_log_and_end() -> None:
    turns = AppendTurns()
    assert turns.wait_s(1, 0.0) == 0
    turns.saw(1, 0.2, 0.0)
    turns.saw(2, 1e9, 0.0)
    assert turns.wait_s(1, 0.0) == 0
    assert turns.wait_s(2, 0.0) == pytest.approx(0.2)
    assert turns.wait_s(3, 0.0) == TURN_S_MAX
    turns.saw(2, None, 0.1)  # it had its turn
    assert turns.wait_s(3, 0.1) == pytest.approx(0.1)
    assert turns.wait_s(3, 0.2) == 0
