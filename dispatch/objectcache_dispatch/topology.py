"""The cluster: nodes with their NICs and workers, and the storage servers that they read from.

Any shape: nodes whose NICs differ, nodes without workers that only relay, nodes without a storage
NIC, workers of both roles on one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from objectcache_dispatch.checks import (
    check_at_least,
    check_distinct,
    check_name,
    check_positive,
)
from objectcache_schemas.errors import InvalidRequest

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class ClusterWorker:
    """A process that computes, with its GPU (paper: engine).

    `group` is whose leader fetches for it (section 6.1); all of a group have one role.
    `kv_capacity_tokens` is how many tokens' KV a decode worker's GPU memory holds, without weights
    and activations; of a prefill worker it is not asked, since layerwise prefill holds one layer.
    """

    name: str
    role: Role
    group: str
    kv_capacity_tokens: int = 0

    def __post_init__(self) -> None:
        check_name("worker's name", self.name)
        check_name(f"group of worker {self.name}", self.group)
        if self.role not in ROLES:
            raise InvalidRequest(f"role of worker {self.name} is {self.role!r}; one of {ROLES}")
        least = 1 if self.role == "decode" else 0
        check_at_least(f"kv_capacity_tokens of worker {self.name}", self.kv_capacity_tokens, least)


@dataclass(frozen=True, slots=True)
class Node:
    """A machine. Rates are bytes a second in one direction.

    `storage_nic_bytes_per_s` of 0 is a node that reads nothing from storage by itself.
    `compute_nic_bytes_per_s` is one compute NIC's, of which there are `compute_nics` (paper: one a
    GPU). `memory_bytes_per_s` counts reads and writes together; 0 is not known.
    `landing_bytes` is the memory in which a relay lets deliveries for others land (paper: PE and DE
    buffer); 0 is a node that does not relay.
    """

    name: str
    storage_nic_bytes_per_s: float
    compute_nic_bytes_per_s: float
    compute_nics: int = 1
    memory_bytes_per_s: float = 0.0
    landing_bytes: int = 0
    workers: tuple[ClusterWorker, ...] = ()

    def __post_init__(self) -> None:
        check_name("node's name", self.name)
        check_at_least(
            f"storage_nic_bytes_per_s of node {self.name}", self.storage_nic_bytes_per_s, 0
        )
        check_positive(f"compute_nic_bytes_per_s of node {self.name}", self.compute_nic_bytes_per_s)
        check_at_least(f"compute_nics of node {self.name}", self.compute_nics, 1)
        check_at_least(f"memory_bytes_per_s of node {self.name}", self.memory_bytes_per_s, 0)
        check_at_least(f"landing_bytes of node {self.name}", self.landing_bytes, 0)

    def has(self, role: Role) -> bool:
        """Whether a worker of this role runs there."""
        return any(worker.role == role for worker in self.workers)


@dataclass(frozen=True, slots=True)
class StorageHost:
    """A storage server, as a link that all reads of it share."""

    name: str
    nic_bytes_per_s: float

    def __post_init__(self) -> None:
        check_name("storage host's name", self.name)
        check_positive(f"nic_bytes_per_s of storage host {self.name}", self.nic_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Topology:
    """All nodes, in an order that breaks ties; storage hosts where their links are of interest.

    No node is a cluster whose nodes are still to come (`ClusterDispatcher.change_topology`).
    """

    nodes: tuple[Node, ...]
    storage_hosts: tuple[StorageHost, ...] = ()

    def __post_init__(self) -> None:
        check_distinct("node", (node.name for node in self.nodes))
        check_distinct("worker", (worker.name for _, worker in self.placed_workers()))
        check_distinct("storage host", (host.name for host in self.storage_hosts))
        roles = dict[str, Role]()
        for _, worker in self.placed_workers():
            if roles.setdefault(worker.group, worker.role) != worker.role:
                raise InvalidRequest(
                    f"group {worker.group!r} has workers of both roles; all of a group have one"
                )

    def placed_workers(self) -> Iterator[tuple[Node, ClusterWorker]]:
        """Every worker with its node, in order."""
        for node in self.nodes:
            for worker in node.workers:
                yield node, worker

    def groups(self, role: Role) -> tuple[str, ...]:
        """The groups of a role, in the order of their first workers."""
        found = (worker.group for _, worker in self.placed_workers() if worker.role == role)
        return tuple(dict.fromkeys(found))

    def node(self, name: str) -> Node:
        """Raises `InvalidRequest` for a name that no node has."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise InvalidRequest(f"node {name!r} is not in the topology")


def symmetric(
    prefill_nodes: int,
    decode_nodes: int,
    *,
    gpus: int = 8,
    storage_nic_bytes_per_s: float = 50e9,
    compute_nic_bytes_per_s: float = 50e9,
    memory_bytes_per_s: float = 500e9,
    landing_bytes: int = 80 * 10**9,
    kv_capacity_tokens: int = 1_000_000,
    group_nodes: int = 1,
) -> Topology:
    """The paper's clusters, such as 2P4D, with the figures of its section 7.1 by default.

    Nodes are `p0..` and `d0..`, workers `p0.0..`, groups `prefill0..` and `decode0..` of
    `group_nodes` nodes each.
    """
    check_at_least("prefill_nodes", prefill_nodes, 1)
    check_at_least("decode_nodes", decode_nodes, 1)
    check_at_least("gpus", gpus, 1)
    check_at_least("group_nodes", group_nodes, 1)

    def node(role: Role, number: int) -> Node:
        name, group = f"{role[0]}{number}", f"{role}{number // group_nodes}"
        workers = (
            ClusterWorker(f"{name}.{gpu}", role, group, kv_capacity_tokens) for gpu in range(gpus)
        )
        return Node(
            name,
            storage_nic_bytes_per_s,
            compute_nic_bytes_per_s,
            gpus,
            memory_bytes_per_s,
            landing_bytes,
            tuple(workers),
        )

    return Topology(
        (
            *(node("prefill", number) for number in range(prefill_nodes)),
            *(node("decode", number) for number in range(decode_nodes)),
        )
    )
