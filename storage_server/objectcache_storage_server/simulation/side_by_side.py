"""Simulations of several schedules, as many at once as there are cores, and how far they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from objectcache_storage_server.simulation.arrivals import Arrival, at_load
from objectcache_storage_server.simulation.machine import Machine
from objectcache_storage_server.simulation.measures import Measures, measure
from objectcache_storage_server.simulation.run import SimulatedSchedule, simulate

DELIVERIES_ALONE_MAX = 2000  # a process takes a second to start, and so many deliveries a few
SECONDS_A_DELIVERY = 0.003  # about, on one core: what is said before anything is known


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One schedule with the requests coming `load` times as fast."""

    load: float
    schedule: SimulatedSchedule

    def measured(
        self, arrivals: Sequence[Arrival], machine: Machine, tenants: Collection[str]
    ) -> Measures:
        """Simulate it. `tenants` are those that are measured each for itself."""
        coming = at_load(arrivals, self.load)
        outcome = simulate(coming, machine, self.schedule)
        return measure(self.schedule.policy, self.load, coming, machine, outcome, tenants)

    def __str__(self) -> str:
        return f"{self.schedule.policy}, load x{self.load:g}"


def measured(
    runs: Sequence[ComparedRun],
    arrivals: Sequence[Arrival],
    machine: Machine,
    tenants: Collection[str],
) -> list[Measures]:
    """The outcomes in the order of the runs. What goes on is said on standard error."""
    processes = _process_count(len(runs), len(arrivals))
    expected_s = SECONDS_A_DELIVERY * len(runs) * len(arrivals) / processes
    _say(f"{_counted(len(runs), len(arrivals), processes)}, about {max(1, round(expected_s))} s")
    begun_s = time.perf_counter()
    done: dict[int, Measures] = {}
    for number, outcome in _ended(runs, arrivals, machine, tenants, processes):
        done[number] = outcome
        elapsed_s = time.perf_counter() - begun_s
        _say(f"{len(done)} of {len(runs)} after {elapsed_s:.1f} s: {runs[number]}")
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return [done[number] for number in range(len(runs))]


def _counted(run_count: int, delivery_count: int, processes: int) -> str:
    runs = f"{run_count} runs" if run_count > 1 else "one run"
    deliveries = f"{delivery_count:,} deliveries" if delivery_count != 1 else "one delivery"
    at_once = f", {processes} at once" if processes > 1 else ""
    return f"simulating {runs} of {deliveries}{at_once}"


def _process_count(run_count: int, delivery_count: int) -> int:
    if run_count * delivery_count <= DELIVERIES_ALONE_MAX:
        return 1
    return max(1, min(run_count, len(os.sched_getaffinity(0))))


def _ended(
    runs: Sequence[ComparedRun],
    arrivals: Sequence[Arrival],
    machine: Machine,
    tenants: Collection[str],
    processes: int,
) -> Iterator[tuple[int, Measures]]:
    """Each outcome when it is there, with its run's number."""
    if processes == 1:
        for number, run in enumerate(runs):
            yield number, run.measured(arrivals, machine, tenants)
        return
    # Not by fork: the libraries' threads would not be there in the copy.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _ignore_interrupts) as pool:
        futures: dict[Future[Measures], int] = {
            pool.submit(run.measured, arrivals, machine, tuple(tenants)): number
            for number, run in enumerate(runs)
        }
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _ignore_interrupts() -> None:
    """Ctrl-C goes to all processes of the terminal; the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _say(text: str) -> None:
    """In the place of what was said last before a terminal, in a line of its own elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)
