"""Measuring a cell: the paths take turns, so that a slow spell of the machine hits all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.compare.cells import Cell
from benchmarks.compare.contestants import Contestant
from benchmarks.compare.limits import Limits, limit_meter
from benchmarks.compare.rows import Row, Sample
from benchmarks.compare.servers import processor_s
from benchmarks.compare.ways import Way
from benchmarks.compare.worker import Worker, WorkerFailed

SAMPLES_MIN = 3  # of a path that is over its time already, unless it is of ranged requests


@dataclass(frozen=True, slots=True)
class Pace:
    """How often each path is measured in a cell: `rounds` times, fewer where its fetches together
    take longer than `path_s_max`. A path of ranged requests, which take many times as long, may be
    measured once alone, and that may be its first fetch.
    """

    rounds: int
    path_s_max: float
    requests_max: int  # of a fetch; a path that needs more is left out of the cell


@dataclass(slots=True)
class Entrant:
    """A contestant with its running client. `failure` says why it cannot go on with a cell, and
    `failures` keeps them all.
    """

    contestant: Contestant
    worker: Worker | None
    failure: str = ""
    is_over: bool = False
    failures: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Of its first path."""
        return self.contestant.ways[0].name

    @property
    def is_ours(self) -> bool:
        """Whether its paths are ObjectCache's own request."""
        return self.contestant.ways[0].is_ours

    def attempt(self, work: Callable[[Worker], object]) -> None:
        """Do one step, unless one has failed."""
        if self.worker is None or self.failure:
            return
        try:
            work(self.worker)
        except WorkerFailed as error:
            self.failure, self.is_over = str(error), error.is_over
            self.failures.append(self.failure)

    def finish_cell(self) -> None:
        """Delete what was stored. A client that failed, and still answers, may try the next."""
        if not self.is_over:
            self.failure = ""
        self.attempt(lambda worker: worker.drop())

    def reason(self) -> str:
        """Why it was not measured."""
        return self.contestant.missing or self.failure


@dataclass(slots=True)
class _Lane:
    """One path's samples in a cell."""

    entrant: Entrant
    way: Way
    pace: Pace
    samples: list[Sample] = field(default_factory=list)

    def warm_up(self, cell: Cell) -> None:
        """Fetch once, and forget how long it took, unless there is no time for another."""
        if self.too_many(cell):
            return
        self.take()
        is_slow = self._spent_s() > self.pace.path_s_max
        if not (self.way.ranged and is_slow):
            self.samples.clear()

    def take_turn(self, cell: Cell) -> None:
        """Fetch once more, if there is time."""
        has_time = self._spent_s() < self.pace.path_s_max
        needs_more = len(self.samples) < SAMPLES_MIN and not self.way.ranged
        if (has_time or needs_more) and not self.too_many(cell):
            self.take()

    def reason(self, cell: Cell) -> str:
        """Why there are no samples."""
        if self.samples:
            return ""
        return self.too_many(cell) or self.entrant.reason()

    def too_many(self, cell: Cell) -> str:
        """Why its requests would take too long; empty where they would not."""
        requests = self.way.requests(cell.geometry.chunk_count, cell.model.num_layers)
        too_many = requests > self.pace.requests_max
        return f"{requests:,} requests a fetch" if too_many else ""

    def _spent_s(self) -> float:
        return sum(sample.last_s for sample in self.samples)

    def take(self) -> None:
        """Fetch once, and check what came."""

        def fetch(worker: Worker) -> None:
            pids = self.entrant.contestant.server_pids
            before_s = processor_s(pids)
            fetched = worker.fetch(self.way)
            server_s = processor_s(pids) - before_s
            worker.check(self.way)
            self.samples.append(Sample(fetched.arrivals_s, fetched.processor_s, server_s))

        self.entrant.attempt(fetch)


def measure_cell(
    cell: Cell, entrants: Sequence[Entrant], pace: Pace, say: Callable[[str], None]
) -> tuple[list[Row], Limits]:
    """Rows as `measure_paths` has them, and the machine's limits, measured once a round."""
    with limit_meter(cell.payload_bytes) as meter:
        rows = measure_paths(cell, entrants, pace, meter.sample, say)
        return rows, meter.limits()


def measure_paths(
    cell: Cell,
    entrants: Sequence[Entrant],
    pace: Pace,
    each_round: Callable[[], None],
    say: Callable[[str], None],
) -> list[Row]:
    """Store, warm up, measure in turn, delete. A row for each path, measured or not."""
    for entrant in entrants:
        say(f"{cell}: storing, {entrant.name}")
        entrant.attempt(lambda worker: worker.store(cell))
    lanes = [_Lane(entrant, way, pace) for entrant in entrants for way in entrant.contestant.ways]
    for lane in lanes:
        say(f"{cell}: warming up, {lane.way.name}")
        lane.warm_up(cell)
    for number in range(pace.rounds):
        say(f"{cell}: round {number + 1} of {pace.rounds}")
        each_round()
        first = number % len(lanes)
        for lane in (*lanes[first:], *lanes[:first]):
            lane.take_turn(cell)
    rows = [Row(cell, lane.way, tuple(lane.samples), lane.reason(cell)) for lane in lanes]
    for entrant in entrants:
        entrant.finish_cell()
    return rows


def log_file(folder: Path, number: int) -> Path:
    """Where a client's own output goes."""
    return folder / f"client-{number}.log"
