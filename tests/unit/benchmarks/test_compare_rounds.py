"""Who is measured how often in `python -m benchmarks.compare`, with clients that take no time."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from benchmarks.compare.cells import LLAMA, Cell
from benchmarks.compare.clients.redis_client import RedisClient
from benchmarks.compare.clients.store_client import StoreClient
from benchmarks.compare.contestants import Contestant
from benchmarks.compare.rounds import Entrant, Pace, measure_paths
from benchmarks.compare.rows import Row
from benchmarks.compare.ways import RADOSGW, REDIS_IN_PLACE, Way, nixl_obj_way
from benchmarks.compare.worker import Fetched, Worker, WorkerFailed

CELL = Cell(LLAMA, 16, 16)  # one chunk
PACE = Pace(rounds=5, path_s_max=1.0, requests_max=100)
RANGED = nixl_obj_way(RADOSGW, layerwise=True)


class _Client:
    """A worker whose fetches say that they took `last_s`, and fail after so many."""

    def __init__(self, last_s: float, fetches_max: int = 1000, is_over: bool = False) -> None:
        self._is_over = is_over
        self.steps: list[str] = []
        self._last_s = last_s
        self._fetches_max = fetches_max

    def store(self, cell: Cell) -> None:
        self.steps.append("store")

    def fetch(self, way: Way) -> Fetched:
        if self.steps.count("fetch") == self._fetches_max:
            raise WorkerFailed("it broke", self._is_over)
        self.steps.append("fetch")
        return Fetched((0.0, self._last_s), 0.0)

    def check(self, way: Way) -> None:
        self.steps.append("check")

    def drop(self) -> None:
        self.steps.append("drop")


def _entrant(client: _Client, way: Way = REDIS_IN_PLACE) -> Entrant:
    store_client: StoreClient = RedisClient(0)
    store_client.ways = (way,)
    return Entrant(Contestant(store_client), cast(Worker, client))


def _measured(entrants: list[Entrant], pace: Pace) -> list[Row]:
    return measure_paths(CELL, entrants, pace, lambda: None, lambda _: None)


def _samples(client: _Client, way: Way = REDIS_IN_PLACE, pace: Pace = PACE) -> int:
    (row,) = _measured([_entrant(client, way)], pace)
    return len(row.samples)


def test_a_fast_path_is_measured_each_round_after_a_fetch_that_does_not_count() -> None:
    client = _Client(last_s=0.01)
    assert _samples(client) == PACE.rounds
    assert client.steps == ["store", *["fetch", "check"] * (1 + PACE.rounds), "drop"]


def test_a_slow_path_is_measured_until_its_time_is_spent() -> None:
    assert _samples(_Client(last_s=0.3)) == 4


def test_a_path_that_is_over_its_time_at_once_still_has_three_samples() -> None:
    assert _samples(_Client(last_s=7.0)) == 3


def test_a_slow_path_of_ranged_requests_is_fetched_once() -> None:
    client = _Client(last_s=7.0)
    assert _samples(client, RANGED) == 1
    assert client.steps.count("fetch") == 1


def test_a_path_of_too_many_requests_is_left_out_with_their_number() -> None:
    pace = replace(PACE, requests_max=31)
    client = _Client(last_s=0.01)
    (row,) = _measured([_entrant(client, RANGED)], pace)
    assert row.missing == "32 requests a fetch"
    assert "fetch" not in client.steps


def test_a_client_that_fails_keeps_its_samples_and_is_asked_no_more() -> None:
    broken, healthy = _Client(0.01, fetches_max=3), _Client(0.01)
    entrants = [_entrant(broken), _entrant(healthy)]
    first, second = _measured(entrants, PACE)
    assert (len(first.samples), len(second.samples)) == (2, PACE.rounds)
    assert entrants[0].failures == ["it broke"]
    assert broken.steps[-1] == "drop"
    assert len(broken.steps) < len(healthy.steps)


def test_a_client_that_failed_may_try_the_next_prefix_unless_its_process_is_gone() -> None:
    answers, gone = _Client(0.01, fetches_max=0), _Client(0.01, fetches_max=0, is_over=True)
    entrants = [_entrant(answers), _entrant(gone)]
    for _ in range(2):
        rows = _measured(entrants, PACE)
        assert [row.missing for row in rows] == ["it broke", "it broke"]
    assert answers.steps == ["store", "drop"] * 2
    assert gone.steps == ["store"]


def test_a_client_that_fails_at_once_has_a_row_with_the_reason() -> None:
    (row,) = _measured([_entrant(_Client(0.01, 0))], PACE)
    assert row.samples == ()
    assert row.missing == "it broke"
