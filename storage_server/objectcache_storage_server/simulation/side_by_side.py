"""Simulations of several schedules, as many at once as there are cores, and how far they are."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized

from objectcache_storage_server.simulation.arrivals import Arrival, at_load
from objectcache_storage_server.simulation.machine import Machine
from objectcache_storage_server.simulation.measures import Measures, measure
from objectcache_storage_server.simulation.progress import EVERY_S, SimulationProgress
from objectcache_storage_server.simulation.run import SimulatedSchedule, simulate

DELIVERIES_ALONE_MAX = 2000  # a process takes a second to start, and so many deliveries a few

# Not by fork: the libraries' threads would not be there in the copy.
_PROCESSES = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One schedule with the requests coming `load` times as fast."""

    load: float
    schedule: SimulatedSchedule

    def measured(
        self,
        arrivals: Sequence[Arrival],
        machine: Machine,
        tenants: Collection[str],
        on_end: Callable[[], None],
    ) -> Measures:
        """Simulate it. `tenants` are those that are measured each for itself; `on_end` is called at
        each delivery's end.
        """
        coming = at_load(arrivals, self.load)
        outcome = simulate(coming, machine, self.schedule, on_end)
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
    ended = _Ended()
    progress = SimulationProgress(len(runs), len(arrivals), lambda: ended.count.value)
    progress.begin(processes)
    done: dict[int, Measures] = {}
    simulating = (
        _one_after_the_other(runs, arrivals, machine, tenants, ended, progress)
        if processes == 1
        else _in_processes(runs, arrivals, machine, tenants, ended, progress, processes)
    )
    for number, outcome in simulating:
        done[number] = outcome
        progress.run_ended(str(runs[number]))
    progress.end()
    return [done[number] for number in range(len(runs))]


def _process_count(run_count: int, delivery_count: int) -> int:
    if run_count * delivery_count <= DELIVERIES_ALONE_MAX:
        return 1
    return max(1, min(run_count, len(os.sched_getaffinity(0))))


class _Ended:
    """How many deliveries have ended, counted by all processes."""

    def __init__(self) -> None:
        self.count: Synchronized[int] = _PROCESSES.Value("q", 0)

    def add(self) -> None:
        with self.count.get_lock():
            self.count.value += 1


def _one_after_the_other(
    runs: Sequence[ComparedRun],
    arrivals: Sequence[Arrival],
    machine: Machine,
    tenants: Collection[str],
    ended: _Ended,
    progress: SimulationProgress,
) -> Iterator[tuple[int, Measures]]:
    """Each outcome when it is there, with its run's number."""

    def on_end() -> None:
        ended.add()
        progress.look()

    for number, run in enumerate(runs):
        yield number, run.measured(arrivals, machine, tenants, on_end)


def _in_processes(
    runs: Sequence[ComparedRun],
    arrivals: Sequence[Arrival],
    machine: Machine,
    tenants: Collection[str],
    ended: _Ended,
    progress: SimulationProgress,
    processes: int,
) -> Iterator[tuple[int, Measures]]:
    """Each outcome when it is there, with its run's number."""
    # The last take longest, the cleverest policy under the highest load: with them at the beginning
    # none goes on alone at the end, and what is left is not told too small.
    numbered = list(enumerate(runs))[::-1]
    with ProcessPoolExecutor(processes, _PROCESSES, _begin_process, (ended,)) as pool:
        futures: dict[Future[Measures], int] = {
            pool.submit(_measured, run, arrivals, machine, tuple(tenants)): number
            for number, run in numbered
        }
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, EVERY_S, FIRST_COMPLETED)
                for future in done:
                    yield futures[future], future.result()
                progress.look()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


# --- in a process of the pool ---

_count_end: Callable[[], None]


def _begin_process(ended: _Ended) -> None:
    global _count_end
    _count_end = ended.add
    # Ctrl-C goes to all processes of the terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _measured(
    run: ComparedRun, arrivals: Sequence[Arrival], machine: Machine, tenants: Collection[str]
) -> Measures:
    return run.measured(arrivals, machine, tenants, _count_end)
