"""The simulated log's rules, and what is measured for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.scale_out.index_costs import GIVEN, measured_costs
from benchmarks.scale_out.shared_pipe import SharedPipe
from benchmarks.scale_out.simulated_log import Change, CommitLog, LogServer, StoreTimes
from benchmarks.scale_out.virtual_clock import VirtualClock


def log_of(clock: VirtualClock) -> CommitLog:
    return CommitLog(clock, StoreTimes(), GIVEN, 32, random.Random(0))


def test_transfers_share_a_pipe_evenly() -> None:
    clock, ended = VirtualClock(), dict[str, float]()
    pipe = SharedPipe(clock, 100.0)

    def carry(name: str, size_bytes: float) -> None:
        def note() -> None:
            ended[name] = clock.now_s

        pipe.carry(size_bytes, note)

    carry("short", 100.0)
    carry("long", 200.0)
    clock.after(2.5, lambda: carry("late", 25.0))
    clock.run()
    assert ended == pytest.approx({"short": 2.0, "late": 3.0, "long": 3.25})
    assert pipe.carried_bytes == pytest.approx(325.0)


def test_changes_that_wait_at_once_become_one_record() -> None:
    clock = VirtualClock()
    log = log_of(clock)
    server = LogServer(log, 1)
    ended: list[float] = []
    for block in range(10):
        server.commit(Change(0.0, lambda: ended.append(clock.now_s), blocks=(block,)))
    clock.run()
    assert len(ended) == 10
    assert [record.chunks for record in log.records] == [320]


def test_of_two_servers_that_append_at_once_one_judges_again() -> None:
    clock = VirtualClock()
    log = log_of(clock)
    one, other = LogServer(log, 1), LogServer(log, 2)
    ended: list[int] = []
    one.commit(Change(0.0, lambda: ended.append(1), blocks=(1, 2)))
    other.commit(Change(0.0, lambda: ended.append(2), blocks=(2, 3)))
    clock.run()
    assert sorted(ended) == [1, 2]
    assert log.lost_races == 1
    first, second = log.records
    assert {first.writer, second.writer} == {1, 2}
    assert (first.chunks, second.chunks) == (64, 32)
    assert one.end == other.end == 2
    assert len(log.lag_s) == 2


def test_a_large_change_comes_through_beside_small_ones_by_asking_for_a_turn() -> None:
    clock = VirtualClock()
    log = log_of(clock)
    small, large = LogServer(log, 1), LogServer(log, 2)
    ended: list[float] = []

    def again(left: int) -> Callable[[], None]:
        def commit() -> None:
            if left and not ended:
                small.commit(Change(clock.now_s, again(left - 1), blocks=(-left,)))

        return commit

    again(10_000)()
    large.commit(Change(0.0, lambda: ended.append(clock.now_s), blocks=tuple(range(300))))
    clock.run()
    assert log.turns_asked == 1
    assert len(ended) == 1
    assert len(log.records) < 1_000


@pytest.mark.parametrize("waiting", [1, 2, 8])
def test_a_turn_is_had_beside_a_server_whose_line_is_never_empty(waiting: int) -> None:
    clock = VirtualClock()
    # A store that takes always the same: whoever has appended last would win every race.
    log = CommitLog(clock, StoreTimes(steady_share=1.0), GIVEN, 32, random.Random(0))
    small, large = LogServer(log, 1), LogServer(log, 2)
    ended: list[float] = []
    blocks = iter(range(-1, -20_000, -1))

    def again() -> None:
        if not ended and (block := next(blocks, None)) is not None:
            small.commit(Change(clock.now_s, again, blocks=(block,)))

    for _ in range(waiting):
        again()
    large.commit(Change(0.0, lambda: ended.append(clock.now_s), blocks=tuple(range(300))))
    clock.run()
    assert log.turns_asked == 1
    assert ended[0] < 1.0


def test_a_block_that_is_stored_is_not_stored_again() -> None:
    clock = VirtualClock()
    log = log_of(clock)
    server = LogServer(log, 1)
    ended: list[int] = []
    server.commit(Change(0.0, lambda: ended.append(1), blocks=(1, 2)))
    clock.run()
    server.commit(Change(clock.now_s, lambda: ended.append(2), blocks=(2, 1)))
    clock.run()
    assert ended == [1, 2]
    assert len(log.records) == 1


def test_costs_are_measured_with_the_index_itself(tmp_path: Path) -> None:
    costs = measured_costs(tmp_path, records=3)
    assert costs.chunk_bytes == pytest.approx(GIVEN.chunk_bytes, rel=0.1)
    assert min(costs.apply_chunk_s, costs.judge_chunk_s) > 0
