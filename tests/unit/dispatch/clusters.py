"""Requests and clusters of the dispatch library's tests, with round figures."""

from __future__ import annotations

from objectcache_dispatch import ClusterWorker, DispatchRequest, Node, Role, Topology

RATE = 1000.0  # bytes a second of a storage NIC
COMPUTE_RATE = 8000.0


def request(
    name: str,
    cached: int = 90,
    new: int = 10,
    *,
    layer_bytes: int = 100,
    num_layers: int = 10,
    window_s: float | None = None,
    chunk_bytes: int = 0,
) -> DispatchRequest:
    return DispatchRequest(
        name,
        cached,
        new,
        layer_bytes * num_layers,
        layer_bytes,
        num_layers,
        window_s,
        chunk_bytes=chunk_bytes,
    )


def node(
    name: str,
    role: Role | None = None,
    *,
    workers: int = 1,
    group: str = "",
    rate: float = RATE,
    compute_rate: float = COMPUTE_RATE,
    landing_bytes: int = 100_000,
    kv_capacity_tokens: int = 10_000,
) -> Node:
    """Workers are NAME.0, NAME.1 and so on; a node without a role has none."""
    here = tuple(
        ClusterWorker(f"{name}.{number}", role, group or f"{role}s", kv_capacity_tokens)
        for number in range(workers)
        if role is not None
    )
    return Node(name, rate, compute_rate, max(1, workers), 0.0, landing_bytes, here)


def one_of_each(*others: Node) -> Topology:
    return Topology((node("p", "prefill"), node("d", "decode"), *others))
