"""How busy every link of a cluster is, for given flows of stored KV (section 4.2, any topology).

Of r bytes/s that a node reads, in the paper's labels (figure 4). Copies between a node's memory
and its GPUs go over the compute NIC where they are assisted by it ("CNIC-assisted", section 5.2),
else over PCIe, which no line here counts; they read and write the memory either way.

| read by | storage NIC | compute NIC out (reads PCIe) | compute NIC in (writes PCIe) | memory |
| --- | --- | --- | --- | --- |
| prefill node P | P: r | P: r (5), copies: r (3) | P: copies: r (4) | P: 2 r |
| decode node D | D: r | D: r (3) | P: r (5) | D: 2 r |
| another node N | N: r | N: r, P: r (5) | P: r | N: 2 r |

To decode, D needs the KV in its GPUs: of what P has (read by P or N) D's compute NIC takes in r (7)
and its memory 2 r, of what D has read the memory r; copies: r out (8 or 6) and r in (9 or 7). KV of
new tokens is left out, as in the paper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from objectcache_dispatch.checks import check_at_least
from objectcache_dispatch.topology import Node, Topology
from objectcache_schemas.errors import InvalidRequest

LinkKind = Literal["storage_nic", "compute_nic_out", "compute_nic_in", "memory", "storage_host"]


@dataclass(frozen=True, slots=True)
class PrefixFlow:
    """Stored KV for requests of a pair of nodes. `decode` None: nothing is handed over."""

    prefill: str
    decode: str | None
    reader: str
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_at_least("bytes_per_s of a flow", self.bytes_per_s, 0)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """What goes over a link, of what it gives: a node's compute NICs are counted together."""

    place: str  # a node, or a storage host
    link: LinkKind
    used_bytes_per_s: float
    capacity_bytes_per_s: float

    @property
    def share(self) -> float:
        """Over 1, the flows do not fit."""
        return self.used_bytes_per_s / self.capacity_bytes_per_s


def bottlenecks(
    topology: Topology, flows: Iterable[PrefixFlow], *, copies_over_compute_nic: bool = True
) -> list[Utilisation]:
    """Every link with its load, the busiest first.

    Memory of unknown bandwidth is left out. Storage hosts share the reads in proportion to their
    NICs. Raises `InvalidRequest` for a flow with a node that is not in the topology, or read by a
    node without a storage NIC.
    """
    used: dict[tuple[str, LinkKind], float] = defaultdict(float)
    nodes = {node.name: node for node in topology.nodes}
    read_bytes_per_s = 0.0
    for flow in flows:
        for name in (flow.prefill, flow.reader, *([flow.decode] if flow.decode else [])):
            if name not in nodes:
                raise InvalidRequest(f"node {name!r} of a flow is not in the topology")
        if flow.bytes_per_s and not nodes[flow.reader].storage_nic_bytes_per_s:
            raise InvalidRequest(f"node {flow.reader!r} reads, and has no storage NIC")
        read_bytes_per_s += flow.bytes_per_s
        for place, link, times in _crossings(flow, copies_over_compute_nic):
            used[place, link] += times * flow.bytes_per_s
    found = [
        Utilisation(node.name, link, used[node.name, link], capacity)
        for node in topology.nodes
        for link, capacity in _capacities(node)
        if capacity
    ]
    together = sum(host.nic_bytes_per_s for host in topology.storage_hosts)
    for host in topology.storage_hosts:
        carried = read_bytes_per_s * host.nic_bytes_per_s / together
        found.append(Utilisation(host.name, "storage_host", carried, host.nic_bytes_per_s))
    found.sort(key=lambda utilisation: -utilisation.share)
    return found


def saturating_flows(topology: Topology) -> list[PrefixFlow]:
    """Every storage NIC at its rate, balanced as section 4.2 takes it: what a prefill node reads is
    for all decode nodes alike, what a decode node reads for all prefill nodes alike, and what a
    node without workers reads for all pairs.

    "Alike" is in proportion to nodes' workers of the role.
    """
    prefill = _weights(topology, "prefill")
    decode = _weights(topology, "decode")
    flows = list[PrefixFlow]()
    for node in topology.nodes:
        if not node.storage_nic_bytes_per_s:
            continue
        to = {node.name: 1.0} if node.name in prefill else prefill
        of: list[tuple[str | None, float]] = [*decode.items()] or [(None, 1.0)]
        if node.name in decode and node.name not in prefill:
            of = [(node.name, 1.0)]
        flows += [
            PrefixFlow(p, d, node.name, node.storage_nic_bytes_per_s * share_p * share_d)
            for p, share_p in to.items()
            for d, share_d in of
        ]
    return flows


def _crossings(flow: PrefixFlow, copies: bool) -> Iterator[tuple[str, LinkKind, int]]:
    """Which links a flow crosses, and how often."""
    prefill, decode, reader = flow.prefill, flow.decode, flow.reader
    yield reader, "storage_nic", 1
    yield reader, "memory", 2  # written from storage, read for the prefill worker
    if reader != prefill or copies:
        yield reader, "compute_nic_out", 1
        yield prefill, "compute_nic_in", 1
    if decode is None or decode == prefill:
        return
    if reader == decode:
        yield decode, "memory", 1
    else:
        yield prefill, "compute_nic_out", 1
        yield decode, "compute_nic_in", 1
        yield decode, "memory", 2
    if copies:
        yield decode, "compute_nic_out", 1
        yield decode, "compute_nic_in", 1


def _capacities(node: Node) -> list[tuple[LinkKind, float]]:
    compute = node.compute_nics * node.compute_nic_bytes_per_s
    return [
        ("storage_nic", node.storage_nic_bytes_per_s),
        ("compute_nic_out", compute),
        ("compute_nic_in", compute),
        ("memory", node.memory_bytes_per_s),
    ]


def _weights(topology: Topology, role: Literal["prefill", "decode"]) -> dict[str, float]:
    counts = {
        node.name: sum(worker.role == role for worker in node.workers) for node in topology.nodes
    }
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items() if count}
