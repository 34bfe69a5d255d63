"""What carries the bytes, and what computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_storage_server.deliveries.plan import (
    plan_chunks,
)
from objectcache_storage_server.engines.base import Placement
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.ttft_model import ttft_at_rate
from objectcache_storage_server.simulation.arrivals import Arrival

CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates are bytes per second; infinity is no limit. Every request has a GPU of its own.
    `nic_bytes_per_s` is the storage server's own network card's; `nics` are those that requests go
    to, by name.

    `engine_latency_s` passes between asking the engine for a fragment and its first byte; any
    number of fragments are read at once, which share the engine's rate.
    """

    cap_bytes_per_s: float
    nic_bytes_per_s: float = math.inf
    engine_bytes_per_s: float = math.inf
    engine_latency_s: float = 0.0
    num_layers: int = 32
    token_layer_bytes: int = 4096  # keys and values of one token (Llama 3.1 8B)
    nics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def alone_bytes_per_s(self) -> float:
        """What a single delivery gets, of a NIC that is not slower."""
        return min(self.cap_bytes_per_s, self.nic_bytes_per_s, self.engine_bytes_per_s)

    def alone_at_bytes_per_s(self, nic: str) -> float:
        """The same of any NIC."""
        return min(self.alone_bytes_per_s, self.nics.get(nic, math.inf))

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        return self.token_layer_bytes * self.num_layers

    def demand(self, arrival: Arrival) -> Demand:
        """An arrival as it is."""
        layer_bytes = arrival.cached_tokens * self.token_layer_bytes
        return Demand(
            layer_bytes,
            arrival.compute_window_s,
            self.num_layers,
            tenant=arrival.tenant,
            nic=arrival.nic,
        )

    def told_demand(self, arrival: Arrival) -> Demand:
        """An arrival as the policies see it."""
        return replace(self.demand(arrival), compute_window_s=arrival.told_window_s)

    def alone_ttft_s(self, arrival: Arrival) -> float:
        """From its arrival to its first token, if it were alone."""
        demand = self.demand(arrival)
        rate = self.alone_at_bytes_per_s(arrival.nic)
        if arrival.is_chunkwise:
            return self.engine_latency_s + demand.payload_bytes / rate + _computing_s(demand)
        return self.engine_latency_s + ttft_at_rate(demand, rate)


class SimulatedClient:
    """A request: the job of its delivery, and the GPU that prefetches a layer while it computes
    the one before.
    """

    def __init__(self, arrival: Arrival, machine: Machine, fragment_bytes: int) -> None:
        self.arrival = arrival
        self.demand = machine.demand(arrival)
        self.is_admitted = False  # by the scheduler
        self.is_gone = False
        self.arrived_bytes = 0
        self.origin_s = 0.0  # when the GPU could have begun, not to wait later
        mode = DeliveryMode.CHUNKWISE if arrival.is_chunkwise else DeliveryMode.LAYERWISE
        self._fragments = _fragments(self.demand, fragment_bytes, machine.token_layer_bytes, mode)
        self._next = next(self._fragments, None)

    def take(self) -> Fragment | None:
        """See `delivery_flow.ScheduledJob`; the client's memory has room for all."""
        fragment = self._next
        if fragment is not None:
            self._next = next(self._fragments, None)
        return fragment

    def admitted(self, rate_bytes_per_s: float | None) -> None:
        """See `delivery_flow.ScheduledJob`."""
        self.is_admitted = True

    def arrived(self, fragment: Fragment, at_s: float) -> None:
        """The fragment's last byte is in the client's memory. They come in their order."""
        self.arrived_bytes += fragment.length_bytes
        first_layer = 0 if self.arrival.is_chunkwise else fragment.first_layer
        window_s = self.demand.compute_window_s or 0.0
        self.origin_s = max(self.origin_s, at_s - first_layer * window_s)

    @property
    def arrived_layers(self) -> int:
        """Layers that are whole; of a chunkwise delivery none before all are."""
        if self.arrival.is_chunkwise and self.arrived_bytes < self.demand.payload_bytes:
            return 0
        return self.arrived_bytes // self.demand.layer_bytes

    def computed_s(self, layers: int) -> float:
        """When the GPU is through with the first layers, the last of which has just arrived."""
        return self.origin_s + layers * (self.demand.compute_window_s or 0.0)

    @property
    def is_sent(self) -> bool:
        """Whether nothing is left to take."""
        return self._next is None

    @property
    def ttft_s(self) -> float:
        """From the request's arrival until its last layer is computed."""
        return self.origin_s + _computing_s(self.demand) - self.arrival.at_s

    def __repr__(self) -> str:
        return f"<Client {self.arrived_bytes}/{self.demand.payload_bytes} bytes>"


def _computing_s(demand: Demand) -> float:
    return demand.num_layers * (demand.compute_window_s or 0.0)


def _fragments(
    demand: Demand, fragment_bytes: int, token_layer_bytes: int, mode: DeliveryMode
) -> Iterator[Fragment]:
    """As the server's planner cuts them, of chunks of CHUNK_TOKENS."""
    slice_bytes = CHUNK_TOKENS * token_layer_bytes
    chunks = max(1, round(demand.layer_bytes / slice_bytes))
    keys = tuple(map(str, range(chunks)))
    descriptor = Descriptor(keys, demand.num_layers, CHUNK_TOKENS, demand.layer_bytes // chunks)
    whole = max(fragment_bytes, descriptor.per_layer_chunk_bytes)
    placements = [Placement(0, 0)] * chunks
    return plan_chunks(descriptor, placements, mode, whole).fragments()
