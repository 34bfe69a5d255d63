"""From samples to the table's rows, and what is judged. Nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.compare.cells import Cell
from benchmarks.compare.ways import Way
from objectcache_storage_server.scheduling.ttft_model import ttft_of_arrivals

GB = 1e9
FIRST_LAYER_GOAL = 0.5  # of the best peer's, at most
PERSISTENT_GOAL = 1.0  # of the best peer's that persists, at most
S3_GOAL = 0.5  # of the best S3 path's, at most: twice as fast


@dataclass(frozen=True, slots=True)
class Sample:
    """One fetch. `arrivals_s[l]` is when layer l was whole, from the call; seconds of processor
    time are of all threads, and of all processes of the server.
    """

    arrivals_s: tuple[float, ...]
    client_processor_s: float
    server_processor_s: float

    @property
    def first_s(self) -> float:
        """When computing could begin."""
        return self.arrivals_s[0]

    @property
    def last_s(self) -> float:
        """When everything was there."""
        return max(self.arrivals_s)


@dataclass(frozen=True, slots=True)
class Row:
    """What a way took for a cell, or why it was not measured (`missing`, without samples)."""

    cell: Cell
    way: Way
    samples: tuple[Sample, ...]
    missing: str = ""

    @property
    def first_layer_s(self) -> float:
        """Median time to the first layer."""
        return statistics.median(sample.first_s for sample in self.samples)

    @property
    def first_layer_p99_s(self) -> float:
        """99 of 100 are no slower; with few samples close to the worst."""
        return _p99([sample.first_s for sample in self.samples])

    @property
    def last_layer_s(self) -> float:
        """Median time to the last layer."""
        return statistics.median(sample.last_s for sample in self.samples)

    @property
    def last_layer_p99_s(self) -> float:
        """As `first_layer_p99_s`."""
        return _p99([sample.last_s for sample in self.samples])

    @property
    def ttft_s(self) -> float:
        """Median time to the first token, were each layer computed as soon as it is there and the
        one before is through.
        """
        window_s = self.cell.compute_window_s
        return statistics.median(
            ttft_of_arrivals(sample.arrivals_s, window_s) for sample in self.samples
        )

    @property
    def rate_bytes_per_s(self) -> float:
        """Of the median fetch."""
        return self.cell.payload_bytes / self.last_layer_s

    @property
    def client_s_per_gb(self) -> float:
        """Processor seconds of the client for 10^9 bytes, over all samples."""
        return self._per_gb(sum(sample.client_processor_s for sample in self.samples))

    @property
    def server_s_per_gb(self) -> float:
        """Processor seconds of the server's processes for 10^9 bytes, over all samples."""
        return self._per_gb(sum(sample.server_processor_s for sample in self.samples))

    def _per_gb(self, seconds: float) -> float:
        return seconds / (len(self.samples) * self.cell.payload_bytes / GB)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One goal for one of our ways: `ratio` of ours to the best peer's, at most `goal`."""

    what: str
    ours: str
    peer: str
    ratio: float
    goal: float

    @property
    def is_met(self) -> bool:
        """Whether ours is fast enough."""
        return self.ratio <= self.goal

    def __str__(self) -> str:
        verdict = "met" if self.is_met else "MISSED"
        return (
            f"{verdict}: {self.ours}: {self.what}: {self.ratio:.3f} of {self.peer} "
            f"(at most {self.goal:g})"
        )


def judge(rows: Sequence[Row], cell: Cell) -> list[Judgement]:
    """Each of our ways against the best peers at `cell`.

    Where no peer of a kind was measured, nothing is judged against it.
    """
    measured = [row for row in rows if row.cell == cell and row.samples]
    peers = [row for row in measured if not row.way.is_ours]
    judgements: list[Judgement] = []
    for ours in (row for row in measured if row.way.is_ours):
        judgements += [
            *_against("first layer, best peer", _first, FIRST_LAYER_GOAL, ours, peers),
            *_against(
                "last layer, best peer that persists",
                *(_last, PERSISTENT_GOAL, ours),
                [row for row in peers if row.way.persists],
            ),
            *_against(
                "last layer, best S3 path",
                *(_last, S3_GOAL, ours),
                [row for row in peers if row.way.is_s3],
            ),
        ]
    return judgements


def _against(
    what: str, of: Callable[[Row], float], goal: float, ours: Row, peers: Sequence[Row]
) -> list[Judgement]:
    if not peers:
        return []
    best = min(peers, key=of)
    return [Judgement(what, ours.way.name, best.way.name, of(ours) / of(best), goal)]


def _first(row: Row) -> float:
    return row.first_layer_s


def _last(row: Row) -> float:
    return row.last_layer_s


def _p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))
