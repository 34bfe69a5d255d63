"""Runs of the cluster simulator, each made once, several processes beside each other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from objectcache_dispatch import symmetric
from objectcache_laboratory.cluster.measures import ClusterMeasures
from objectcache_laboratory.cluster.models import model_named
from objectcache_laboratory.cluster.run import ClusterOptions, Reads, simulate
from objectcache_laboratory.cluster.trajectories import TRACES, replayed

ORACLE = "oracle"
SEED = 1
PROCESSES_MAX = 8


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """One run: `agents` of a trace at once, or `agents_per_s` that arrive for `duration_s`, of
    which the second half is measured. `routes` are the simulator's, or those of the Oracle.
    """

    prefill_nodes: int
    decode_nodes: int
    model: str
    trace: str
    agents: int
    routes: str
    reads: Reads = "layerwise"
    append_scale: float = 1.0
    generate_scale: float = 1.0
    agents_per_s: float | None = None
    duration_s: float = float("inf")

    @property
    def nodes(self) -> str:
        """As the paper writes it: 2P4D."""
        return f"{self.prefill_nodes}P{self.decode_nodes}D"

    @classmethod
    def arriving(
        cls, nodes: tuple[int, int], model: str, routes: str, agents_per_s: float, duration_s: float
    ) -> SimulatedCluster:
        """Agents of the 64K trace, somewhat more than arrive on average, so that none is short."""
        agents = int(agents_per_s * duration_s * 1.2) + 20
        return cls(
            *nodes, model, "64K", agents, routes, agents_per_s=agents_per_s, duration_s=duration_s
        )

    def run(self) -> ClusterMeasures:
        """In this process."""
        model, shape = model_named(self.model), TRACES[self.trace]
        trajectories = replayed(shape, self.agents, SEED)
        if (self.append_scale, self.generate_scale) != (1.0, 1.0):
            trajectories = [
                each.scaled(self.append_scale, self.generate_scale, shape.tokens_max)
                for each in trajectories
            ]
        topology = symmetric(
            self.prefill_nodes, self.decode_nodes, kv_capacity_tokens=model.kv_capacity_tokens
        )
        is_oracle = self.routes == ORACLE
        options = ClusterOptions(
            routes="paper" if is_oracle else self.routes,
            reads=self.reads,
            is_oracle=is_oracle,
            arrivals_per_s=self.agents_per_s,
            warm_s=self.duration_s / 2 if self.agents_per_s is not None else 0.0,
            until_s=self.duration_s,
            seed=SEED,
        )
        return replace(simulate(topology, model, trajectories, options), routes=self.routes)


_found: dict[SimulatedCluster, ClusterMeasures] = {}


def simulated(
    clusters: Iterable[SimulatedCluster], say: Callable[[str], None], *, is_quick: bool
) -> dict[SimulatedCluster, ClusterMeasures]:
    """The measures of each; figures that share a run have it made once.

    Runs are of one thread each, so a process for each processor makes them; a quick one stays in
    this process, since its runs are shorter than a process's start.
    """
    wanted = list(dict.fromkeys(clusters))
    # The longest first, so that no process is left with it at the end.
    missing = sorted((each for each in wanted if each not in _found), key=_work, reverse=True)
    processes = min(PROCESSES_MAX, len(os.sched_getaffinity(0)), len(missing))
    if is_quick or processes < 2:
        for number, each in enumerate(missing):
            say(f"{number} of {len(missing)} runs")
            _found[each] = each.run()
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context) as pool:
            measured = pool.map(SimulatedCluster.run, missing)
            for number, (each, measures) in enumerate(zip(missing, measured, strict=True)):
                _found[each] = measures
                say(f"{number + 1} of {len(missing)} runs")
    return {each: _found[each] for each in wanted}


def _work(cluster: SimulatedCluster) -> float:
    """About as many requests as it has."""
    turns = TRACES[cluster.trace].turns
    return cluster.agents * turns / max(cluster.append_scale, cluster.generate_scale)
