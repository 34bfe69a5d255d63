"""Which workers serve a request, and over which node's storage NIC its stored prefix is read.

The scheduler of DualPath (arXiv:2602.21548) for the author of a router, an engine's controller or a
simulator: pure functions, and `ClusterDispatcher`, a state machine around them. No sockets and no
clock: time is an argument, loads are values.

    dispatcher = ClusterDispatcher(topology, DispatchSettings(beta_tokens=100_000))
    decision = dispatcher.select(request, now_s)        # prefill worker, decode worker, route
    ...
    dispatcher.read_done(request.name, now_s)
    dispatcher.completed(request.name, now_s)

The words: a worker (paper: engine) computes on a node; a group of workers fetches together; a route
is `direct` or goes over a node that relays, where it lands in landing memory; a read queue is what
a node's storage NIC has yet to read.
"""

from objectcache_dispatch.capacity.bottlenecks import (
    PrefixFlow,
    Utilisation,
    bottlenecks,
    saturating_flows,
)
from objectcache_dispatch.capacity.pd_ratio import PdRange, RatioBound, pd_ratio
from objectcache_dispatch.compute_quota import LayerTime, fill_batch
from objectcache_dispatch.decode_choice import assign_decode, to_decode_groups
from objectcache_dispatch.dispatcher import ClusterDispatcher, Decision, LostWork
from objectcache_dispatch.loads import NodeLoad, WorkerLoad
from objectcache_dispatch.prefill_choice import Assignment, assign_prefill
from objectcache_dispatch.requests import DispatchRequest
from objectcache_dispatch.route_choice import (
    POLICIES,
    Candidates,
    PartShare,
    RoutePolicy,
    choose_route,
    lateness_s,
    least_lateness,
    shorter_queue,
    shortest_time,
    split,
)
from objectcache_dispatch.routes import ReadRoute, RouteKind, RoutePart
from objectcache_dispatch.settings import DispatchSettings
from objectcache_dispatch.topology import (
    ClusterWorker,
    Node,
    Role,
    StorageHost,
    Topology,
    symmetric,
)

__all__ = [
    "POLICIES",
    "Assignment",
    "Candidates",
    "ClusterDispatcher",
    "ClusterWorker",
    "Decision",
    "DispatchRequest",
    "DispatchSettings",
    "LayerTime",
    "LostWork",
    "Node",
    "NodeLoad",
    "PartShare",
    "PdRange",
    "PrefixFlow",
    "RatioBound",
    "ReadRoute",
    "Role",
    "RouteKind",
    "RoutePart",
    "RoutePolicy",
    "StorageHost",
    "Topology",
    "Utilisation",
    "WorkerLoad",
    "assign_decode",
    "assign_prefill",
    "bottlenecks",
    "choose_route",
    "fill_batch",
    "lateness_s",
    "least_lateness",
    "pd_ratio",
    "saturating_flows",
    "shorter_queue",
    "shortest_time",
    "split",
    "symmetric",
    "to_decode_groups",
]
