"""What routes and the order on NICs are worth, alone: two nodes, and GPUs that are free.

Deliveries of the companion paper's Table A8 arrive as a Poisson process at a prefill node, for
which its own storage NIC or another node's may read. A delivery's GPU begins when it will not wait
for a layer, so what it loses is how much later that is than if both NICs had been idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from objectcache_dispatch import (
    POLICIES,
    ClusterDispatcher,
    ClusterWorker,
    DispatchRequest,
    DispatchSettings,
    Node,
    Topology,
)
from objectcache_laboratory.cluster.events import VirtualTime
from objectcache_laboratory.cluster.links import NICS, NicRead, NicTraffic, ReadOrder, StorageNic
from objectcache_laboratory.cluster.measures import WINDOW_S, TimeSpread
from objectcache_schemas.errors import InvalidRequest

NUM_LAYERS = 32
LAYER_BYTES_PER_TOKEN = 4096
COMPUTE_NIC_BYTES_PER_S = 50e9


class Workload(NamedTuple):
    """A row of Table A8: tokens that are cached, and how long a layer of the rest computes."""

    cached_tokens: int
    window_s: float


TABLE_A8 = (
    Workload(2_048, 0.00579),
    Workload(3_584, 0.00198),
    Workload(8_192, 0.02987),
    Workload(14_336, 0.00880),
    Workload(16_384, 0.08091),
    Workload(28_672, 0.02385),
    Workload(32_768, 0.27102),
    Workload(57_344, 0.07575),
)


@dataclass(frozen=True, slots=True)
class TwoNics:
    """`rates_gbps` of the prefill node's and the other's storage NIC; `load` is the share of both
    that deliveries need.
    """

    rates_gbps: tuple[float, float] = (50.0, 50.0)
    load: float = 0.7
    requests: int = 3_000
    policy: str = "least_lateness"
    order: ReadOrder = "due_time"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidRequest(f"policy {self.policy!r} is not known; of {', '.join(POLICIES)}")
        if not 0 < self.load < 1:
            raise InvalidRequest(f"load is {self.load}; between 0 and 1, or queues never end")


def added_ttft(experiment: TwoNics) -> TimeSpread:
    """Seconds that deliveries lose, over all of them."""
    time = VirtualTime()
    rates = [gbps * 1e9 / 8 for gbps in experiment.rates_gbps]
    nodes = tuple(
        Node(
            f"n{place}",
            rate,
            COMPUTE_NIC_BYTES_PER_S,
            landing_bytes=2**62,
            workers=(ClusterWorker(f"n{place}.0", "prefill", f"g{place}"),),
        )
        for place, rate in enumerate(rates)
    )
    dispatcher = ClusterDispatcher(
        Topology(nodes),
        DispatchSettings(beta_tokens=2**62, lease_s=1e9),
        POLICIES[experiment.policy],
    )
    nics = {
        node.name: NICS[experiment.order](time, rate, NicTraffic(WINDOW_S))
        for node, rate in zip(nodes, rates, strict=True)
    }
    lost_s = list[float]()
    for number, (arrival_s, workload) in enumerate(_arrivals(experiment, sum(rates))):
        begin = partial(_begin, time, dispatcher, nics, f"r{number}", workload, max(rates), lost_s)
        time.at(arrival_s, begin)
    time.run()
    return TimeSpread.of(lost_s)


def _arrivals(experiment: TwoNics, rate_bytes_per_s: float) -> list[tuple[float, Workload]]:
    rng = np.random.default_rng(experiment.seed)
    mean_bytes = float(np.mean([_layer_bytes(row) for row in TABLE_A8])) * NUM_LAYERS
    gap_s = mean_bytes / (experiment.load * rate_bytes_per_s)
    times = np.cumsum(rng.exponential(gap_s, experiment.requests)).tolist()
    rows = rng.integers(len(TABLE_A8), size=experiment.requests).tolist()
    return [(time_s, TABLE_A8[row]) for time_s, row in zip(times, rows, strict=True)]


def _layer_bytes(workload: Workload) -> int:
    return workload.cached_tokens * LAYER_BYTES_PER_TOKEN


def _begin(
    time: VirtualTime,
    dispatcher: ClusterDispatcher,
    nics: dict[str, StorageNic],
    name: str,
    workload: Workload,
    best_rate: float,
    lost_s: list[float],
) -> None:
    layer_bytes, compute_s = _layer_bytes(workload), workload.window_s * NUM_LAYERS
    request = DispatchRequest(
        name,
        workload.cached_tokens,
        1,
        layer_bytes * NUM_LAYERS,
        layer_bytes,
        NUM_LAYERS,
        compute_window_s=workload.window_s,
        chunk_bytes=64 * LAYER_BYTES_PER_TOKEN * NUM_LAYERS,
    )
    decision = dispatcher.route(request, "n0.0", None, time.now_s)
    assert decision is not None, "landing memory is never full"
    layer_s = layer_bytes / best_rate
    alone_s = max(layer_s, NUM_LAYERS * layer_s - (compute_s - workload.window_s))
    begun_s, reads = time.now_s, list[NicRead]()

    def part_read() -> None:
        if all(each.is_over for each in reads):
            dispatcher.completed(name, time.now_s)
            usable_s = max(each.origin_s + each.hop_s for each in reads)
            lost_s.append(usable_s - begun_s - alone_s)

    for part in decision.route.parts:
        part_layer = part.read_bytes / NUM_LAYERS
        hop_s = part_layer / COMPUTE_NIC_BYTES_PER_S if part.relay else 0.0
        reads.append(NicRead(part_layer, NUM_LAYERS, compute_s, hop_s, None, part_read))
    for part, read in zip(decision.route.parts, reads, strict=True):
        nics[part.node].read(read)
