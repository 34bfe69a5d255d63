"""Over whose storage NIC a delivery comes, once its workers are known: one function a policy.

The model (docs/dual_path.md): a node that is busy for b seconds and reads B bytes/s has layer l of
a delivery at the prefill worker at b + (l + 1) s / B + h, where s is a layer's bytes and h its
transfer from a relay, 0 if direct. Layers flow through a relay, so h counts once, and B is at most
what the compute network gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from objectcache_dispatch.loads import NodeLoad
from objectcache_dispatch.prefill_choice import Floats
from objectcache_dispatch.requests import DispatchRequest
from objectcache_dispatch.routes import ReadRoute, RoutePart
from objectcache_dispatch.topology import Topology

# What a NIC has read lately, as lateness: a delivery is at most so much of a second later for it.
# With a hop of half a millisecond NICs are evened out to a fortieth of what they could carry, and a
# cluster that carries less than that reads directly.
RECENT_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Candidates:
    """Nodes that could read a delivery, each array float64[nodes].

    `direct` is the index of the prefill worker's own node, `decode` that of the decode worker's;
    None where it is not among them. `busy_s` is infinite for a node that cannot read.
    `rate_bytes_per_s` is above zero. `hop_s_per_byte` and `room_bytes` (landing memory that is
    free) are 0 and infinite if direct. `recent_s` is how long each NIC will have read for what it
    was given within about the last second; None is not known, and then nothing.
    """

    names: Sequence[str]
    direct: int | None
    decode: int | None
    busy_s: Floats
    rate_bytes_per_s: Floats
    hop_s_per_byte: Floats
    room_bytes: Floats
    recent_s: Floats | None = None


class PartShare(NamedTuple):
    """The index of a candidate, and what it reads; `chunk_count` is 0 of an uncut delivery."""

    candidate: int
    read_bytes: int
    chunk_count: int = 0


RoutePolicy = Callable[[DispatchRequest, Candidates], list[PartShare]]


def lateness_s(request: DispatchRequest, candidates: Candidates) -> Floats:
    """How late the latest layer is, float64[nodes], by each candidate alone: the most of arrival
    minus l x compute window over all l. That is linear in l, so the first or the last layer has it.
    """
    per_layer_s = request.layer_bytes / candidates.rate_bytes_per_s
    begin_s = candidates.busy_s + request.layer_bytes * candidates.hop_s_per_byte
    computing_s = (request.num_layers - 1) * (request.compute_window_s or 0.0)
    last_s = begin_s + request.num_layers * per_layer_s
    latest: Floats = np.maximum(begin_s + per_layer_s, last_s - computing_s)
    return latest


def shorter_queue(request: DispatchRequest, candidates: Candidates) -> list[PartShare]:
    """The paper's: the side with fewer bytes to read."""
    queue_bytes = candidates.busy_s * candidates.rate_bytes_per_s
    return _alone(request, candidates, queue_bytes)


def shortest_time(request: DispatchRequest, candidates: Candidates) -> list[PartShare]:
    """The side that has read its queue first: the paper's for NICs of unequal rates."""
    return _alone(request, candidates, candidates.busy_s)


def least_lateness(request: DispatchRequest, candidates: Candidates) -> list[PartShare]:
    """The side over which the latest layer is the least late.

    What a NIC was given lately counts too, little (`RECENT_SHARE`): where several are idle the
    direct one would always win by its hop, so that prefill nodes' NICs carried more than others'
    until they queue.
    """
    values = lateness_s(request, candidates)
    if candidates.recent_s is not None:
        values = values + RECENT_SHARE * candidates.recent_s
    return _alone(request, candidates, values)


def split(request: DispatchRequest, candidates: Candidates) -> list[PartShare]:
    """Two sides, each with as many whole chunks as it delivers by the same time.

    The first is the one that would be done first alone, the second the one with which the whole is
    done first. Falls back to `least_lateness` where chunks are unknown, or too few, or find no
    room, or a second side would not be done sooner.
    """
    chunk_bytes = request.chunk_bytes
    chunks = request.read_bytes // chunk_bytes if chunk_bytes else 0
    if chunks < 2:
        return least_lateness(request, candidates)
    busy_s = np.where(candidates.room_bytes >= chunk_bytes, candidates.busy_s, np.inf)
    byte_s = 1 / candidates.rate_bytes_per_s + candidates.hop_s_per_byte / request.num_layers
    first = _least(busy_s + request.read_bytes * byte_s, candidates)
    if first is None:
        return []
    # Both are done when their free time from then on, at their rates, has taken all bytes.
    rates = 1 / byte_s
    ready_bytes = busy_s * rates
    done_s = (request.read_bytes + ready_bytes[first] + ready_bytes) / (rates[first] + rates)
    done_s = np.where(done_s > busy_s, done_s, np.inf)  # else it has nothing to do until then
    done_s[first] = np.inf
    second = _least(done_s, candidates)
    if second is None:
        return least_lateness(request, candidates)
    most_first, most_second = (
        int(min(candidates.room_bytes.item(each), request.read_bytes)) // chunk_bytes
        for each in (first, second)
    )
    free_s = done_s.item(second) - busy_s.item(second)
    of_second = round(free_s * rates.item(second) / chunk_bytes)
    of_second = min(max(of_second, chunks - most_first), most_second)
    if not 0 < of_second < chunks or chunks - of_second > most_first:
        return least_lateness(request, candidates)
    parts = [(first, chunks - of_second), (second, of_second)]
    parts.sort(key=lambda part: part[0] != candidates.direct)
    return [PartShare(index, count * chunk_bytes, count) for index, count in parts]


POLICIES: Mapping[str, RoutePolicy] = {
    "least_lateness": least_lateness,
    "shorter_queue": shorter_queue,
    "shortest_time": shortest_time,
    "split": split,
}


def choose_route(
    request: DispatchRequest,
    prefill_node: str,
    decode_node: str | None,
    topology: Topology,
    loads: Mapping[str, NodeLoad],
    policy: RoutePolicy = least_lateness,
    *,
    any_node: bool = True,
) -> ReadRoute | None:
    """The route of a request whose workers run on these nodes; None where no node can take it.

    Loads are as of now: what was assigned since a report is for the caller to add, as
    `ClusterDispatcher` does. `any_node` lets nodes relay that have neither worker; without it there
    are the paper's two candidates. Raises `InvalidRequest` for a node that is not in the topology.
    """
    prefill = topology.node(prefill_node)
    if decode_node is not None:
        topology.node(decode_node)
    nodes = [
        node for node in topology.nodes if any_node or node.name in (prefill_node, decode_node)
    ]
    names = [node.name for node in nodes]
    found = [loads.get(node.name, NodeLoad(node.name)) for node in nodes]
    rates = np.array(
        [
            min(node.storage_nic_bytes_per_s, load.rate_bytes_per_s or node.storage_nic_bytes_per_s)
            for node, load in zip(nodes, found, strict=True)
        ]
    )
    queue_bytes = np.array([load.read_queue_bytes for load in found], np.float64)
    is_usable = np.array([load.is_alive for load in found]) & (rates > 0)
    candidates = candidates_of(
        names,
        names.index(prefill_node),
        None if decode_node is None else names.index(decode_node),
        np.where(is_usable, queue_bytes / np.where(rates > 0, rates, 1.0), np.inf),
        np.where(rates > 0, rates, 1.0),
        np.minimum([n.compute_nic_bytes_per_s for n in nodes], prefill.compute_nic_bytes_per_s),
        np.array(
            [
                node.landing_bytes - load.landing_bytes_used
                for node, load in zip(nodes, found, strict=True)
            ],
            np.float64,
        ),
    )
    return route_of(request, candidates, policy)


def candidates_of(
    names: Sequence[str],
    direct: int,
    decode: int | None,
    busy_s: Floats,
    rate_bytes_per_s: Floats,
    compute_bytes_per_s: Floats,
    room_bytes: Floats,
) -> Candidates:
    """Candidates by their own rates: what is particular about the direct one is put right.

    `compute_bytes_per_s` is what goes between each node and the prefill worker's. `room_bytes` is
    changed in place.
    """
    rates = np.minimum(rate_bytes_per_s, compute_bytes_per_s)
    rates[direct] = rate_bytes_per_s[direct]
    hop_s_per_byte = 1 / compute_bytes_per_s
    hop_s_per_byte[direct] = 0.0
    room_bytes[direct] = np.inf
    return Candidates(
        names,
        direct,
        None if decode == direct else decode,
        busy_s,
        rates,
        hop_s_per_byte,
        room_bytes,
    )


def route_of(
    request: DispatchRequest, candidates: Candidates, policy: RoutePolicy
) -> ReadRoute | None:
    """A policy's choice by the nodes' names, with the lateness that the model predicts."""
    shares = policy(request, candidates)
    if not shares:
        return None
    parts = [
        RoutePart(
            candidates.names[index],
            None if index == candidates.direct else candidates.names[index],
            read_bytes,
            chunk_count,
        )
        for index, read_bytes, chunk_count in shares
    ]
    late_s = max(_part_lateness_s(request, candidates, share) for share in shares)
    return ReadRoute(tuple(parts), late_s)


def _part_lateness_s(request: DispatchRequest, candidates: Candidates, share: PartShare) -> float:
    index, layer_bytes = share.candidate, share.read_bytes / request.num_layers
    per_layer_s = layer_bytes / candidates.rate_bytes_per_s.item(index)
    hop_s = layer_bytes * candidates.hop_s_per_byte.item(index)
    begin_s = candidates.busy_s.item(index) + hop_s
    last = request.num_layers - 1
    computing_s = last * (request.compute_window_s or 0.0)
    return begin_s + per_layer_s + max(0.0, last * per_layer_s - computing_s)


def _alone(request: DispatchRequest, candidates: Candidates, values: Floats) -> list[PartShare]:
    # Values of nodes that cannot read are infinite, since `busy_s` is.
    with_room = candidates.room_bytes >= request.read_bytes
    index = _least(np.where(with_room, values, np.inf), candidates)
    return [] if index is None else [PartShare(index, request.read_bytes)]


def _least(values: Floats, candidates: Candidates) -> int | None:
    """The index of the least; of equal ones the one that moves the fewest bytes: direct, then the
    decode worker's node (which needs them anyway), then the first of the others.
    """
    best = int(values.argmin())
    least = values.item(best)
    if not least < np.inf:
        return None
    for preferred in (candidates.direct, candidates.decode):
        if preferred is not None and values.item(preferred) == least:
            return preferred
    return best
