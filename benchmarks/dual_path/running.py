"""What rows are measured with: a cluster with relays, an engine on the prefill node, bounds."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.basis.bench import Bench
from benchmarks.dual_path.cluster import Cluster, cluster
from benchmarks.dual_path.deliveries import join, put_prompts
from benchmarks.dual_path.namespaces import PREFILL, NodeNetwork
from benchmarks.dual_path.node_process import NodeProcess
from benchmarks.dual_path.node_side import DIRECT, over
from benchmarks.dual_path.volume import Volume

GROUP = "Over other nodes' storage links, in network namespaces"


@dataclass(frozen=True, slots=True)
class Running:
    """A prefill node whose engine has joined all routes, and links with their bounds."""

    cluster: Cluster
    engines: Sequence[NodeProcess]  # on the prefill node: with one relay, two, ..
    volume: Volume
    numbers: Iterator[int]  # of prompts, one after the other

    @property
    def engine(self) -> NodeProcess:
        """Which knows all relays."""
        return self.engines[-1]

    def engine_of(self, relay_count: int) -> NodeProcess:
        """Which knows so many."""
        return self.engines[relay_count - 1]

    @property
    def network(self) -> NodeNetwork:
        """The links."""
        return self.cluster.network

    @property
    def transport(self) -> str:
        """How deliveries reach relays and engines."""
        return self.cluster.transport

    def bound_links(self) -> None:
        """As they are for all rows that do not say otherwise."""
        for name in self.network.nodes:
            self.network.shape_storage(name, self.volume.storage_bytes_per_s)
            self.network.shape_compute(name, self.volume.compute_bytes_per_s)

    def unbound_links(self) -> None:
        """This machine is the limit."""
        for name in self.network.nodes:
            self.network.shape_storage(name, None)
            self.network.shape_compute(name, None)


@contextmanager
def running(bench: Bench, volume: Volume, transport: str) -> Generator[Running]:
    """Start everything and store the prefixes. Raises `NotPossible`."""
    with cluster(bench, volume.relay_nodes, transport) as started:
        for name in volume.relay_nodes:
            started.add_relay(name)
        engines = []
        for count in range(1, len(volume.relay_nodes) + 1):
            relays = volume.relay_nodes[:count]
            engine = started.engine(PREFILL, volume, relays)
            engine.call(put_prompts, list(range(volume.joining_prompt + 1)))
            engine.call(join, [DIRECT, *map(over, relays)])
            engines.append(engine)
        numbers = itertools.cycle(range(volume.deliveries))
        made = Running(started, engines, volume, numbers)
        made.bound_links()
        yield made


def milliseconds_of(seconds: Sequence[float]) -> list[float]:
    """For a row's details."""
    return [round(1000 * second, 2) for second in seconds]
