"""The dispatch service's metrics; nodes and workers are as many as dispatch.nodes_max allows."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from objectcache_gateway.dispatch_service.cluster_state import ClusterState
from objectcache_runtime.metrics.metric_cells import Counts, Histogram
from objectcache_runtime.metrics.metric_families import counter, gauge, histogram, level


def dispatch_families(
    cluster: ClusterState,
    decision_seconds: Histogram,
    requests: Counts[tuple[str, str]],
    now_s: float,
) -> Iterator[Metric]:
    """As everything is counted at `now_s`."""
    state = cluster.state(now_s)
    yield gauge(
        "dispatch_node_read_queue_bytes",
        "Bytes that a node's storage NIC has yet to read.",
        ("node",),
        [((node.name,), node.read_queue_bytes) for node in state.nodes],
    )
    yield gauge(
        "dispatch_node_landing_bytes",
        "Landing memory of a node's relay.",
        ("node", "state"),
        [
            ((node.name, name), amount)
            for node in state.nodes
            for name, amount in (
                ("used", node.landing_bytes_used),
                ("free", max(0, node.landing_bytes - node.landing_bytes_used)),
            )
        ],
    )
    yield gauge(
        "dispatch_node_alive",
        "Whether a node takes part: 0 after it said that it does not.",
        ("node",),
        [((node.name,), float(node.is_alive)) for node in state.nodes],
    )
    yield gauge(
        "dispatch_worker_tokens",
        "Tokens of the requests on a worker that are not finished.",
        ("worker", "node", "role"),
        [((w.name, node.name, w.role), w.tok) for node in state.nodes for w in node.workers],
    )
    yield gauge(
        "dispatch_worker_requests",
        "Requests on a worker that are not finished.",
        ("worker", "node", "role"),
        [((w.name, node.name, w.role), w.seq) for node in state.nodes for w in node.workers],
    )
    yield counter(
        "dispatch_decisions_total",
        "Decisions by the call that asked and the route; none is one that could not be had.",
        ("call", "route"),
        cluster.decisions.items(),
    )
    yield counter(
        "dispatch_requests_total",
        "Calls that were served, by method and path, in which {name} stands for every name.",
        ("method", "path"),
        requests.items(),
    )
    yield histogram(
        "dispatch_decision_seconds",
        "Time to decide a select or a route, without HTTP.",
        (),
        [((), decision_seconds)],
    )
    yield level(
        "dispatch_nic_imbalance_ratio",
        "Of the bytes that storage NICs were given in 5 s: the most of one over the mean.",
        cluster.imbalance(now_s),
    )
    yield level(
        "dispatch_reservations", "Requests that wait or run, each with a lease.", state.reservations
    )
    yield level(
        "dispatch_waiting_requests",
        "Submitted requests that have no prefill worker yet.",
        state.waiting,
    )
    yield counter(
        "dispatch_reservations_ended_total",
        "Reservations by how they ended: completed, released, expired, lost with a node.",
        ("how",),
        cluster.reservations_ended.items(),
    )
    yield counter(
        "dispatch_nodes_ended_total",
        "Nodes by how they ended: removed, expired.",
        ("how",),
        cluster.nodes_ended.items(),
    )
