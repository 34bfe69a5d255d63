"""Which prefill worker takes a request: Algorithm 1 of the paper (section 6.1).

A scan of arrays rather than heaps: of 3,333 workers it takes less than heaps' bookkeeping in
Python, and a node's queue that crosses alpha changes the category of all its workers at once
(`benchmarks/server_costs/dispatching.py` has the figures).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from objectcache_dispatch.loads import NodeLoad, WorkerLoad
from objectcache_dispatch.requests import DispatchRequest
from objectcache_dispatch.topology import Topology

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Assignment(NamedTuple):
    """A request and the name of the worker that takes it."""

    request: DispatchRequest
    worker: str


def choose_prefill(tok: Floats, queue_s: Floats, beta_tokens: float, alpha_s: float) -> int | None:
    """Algorithm 1 for one request; the index of a worker, or None where C2 and C3 are empty.

    `tok` is float64[workers], infinite for one that takes nothing; `queue_s` float64[workers] is
    how long the storage NIC of the worker's node is busy with what it has to read.
    C1: tok > beta, overloaded, gets nothing. C2: queue <= alpha. C3: queue > alpha.
    The least tok of C2, else of C3; of equal ones the shorter queue, then the first.
    """
    if not len(tok):
        return None
    is_open = tok <= beta_tokens
    for category in (is_open & (queue_s <= alpha_s), is_open):
        of_category = np.where(category, tok, np.inf)
        best = int(of_category.argmin())
        least = of_category[best]
        if least < np.inf:
            ties = (of_category == least).nonzero()[0]
            return best if len(ties) == 1 else int(ties[queue_s[ties].argmin()])
    return None


def assign_prefill(
    queue: Iterable[DispatchRequest],
    topology: Topology,
    worker_loads: Mapping[str, WorkerLoad],
    node_loads: Mapping[str, NodeLoad],
    *,
    beta_tokens: float,
    alpha_s: float = 3.0,
    group: str | None = None,
) -> list[Assignment]:
    """One fetch of a prefill group (None: all prefill workers): requests from the queue's head.

    Ends at the first request for which C2 and C3 are empty. alpha is the queue in bytes over the
    NIC's rate, so that it means the same for unequal NICs. What a fetch assigns counts at once, in
    tok and in the queue of the worker's node, which the paper leaves open. A worker or node
    without a load has none. A node that is not alive, and its workers, get nothing. Workers on a
    node without a storage NIC are in C3: C2 is there to keep such NICs busy.
    """
    placed = [
        (node, worker)
        for node, worker in topology.placed_workers()
        if worker.role == "prefill" and group in (None, worker.group)
    ]
    if not placed:
        return []
    nodes = [node_loads.get(node.name, NodeLoad(node.name)) for node, _ in placed]
    rates = np.array([node.storage_nic_bytes_per_s for node, _ in placed], np.float64)
    queue_bytes = np.array([load.read_queue_bytes for load in nodes], np.float64)
    idle = WorkerLoad("none")
    tok = np.array(
        [
            worker_loads.get(worker.name, idle).tok if load.is_alive else np.inf
            for (_, worker), load in zip(placed, nodes, strict=True)
        ],
        np.float64,
    )
    node_names = np.array([node.name for node, _ in placed])
    assigned = list[Assignment]()
    for request in queue:
        queue_s = np.divide(queue_bytes, rates, out=np.full_like(rates, np.inf), where=rates > 0)
        chosen = choose_prefill(tok, queue_s, beta_tokens, alpha_s)
        if chosen is None:
            break
        tok[chosen] += request.tokens
        queue_bytes[node_names == node_names[chosen]] += request.read_bytes
        assigned.append(Assignment(request, placed[chosen][1].name))
    return assigned
