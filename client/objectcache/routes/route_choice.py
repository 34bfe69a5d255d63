"""Which way a delivery takes, by what is known of each: the dispatch library's choice for one node.

A client knows of no NIC's nominal rate: a way of which nothing is known counts as fast as the
fastest, so that the direct one is taken until it is known to be slower.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from objectcache.routes.accounts import RouteLoad
from objectcache_dispatch import POLICIES, DispatchRequest, ReadRoute
from objectcache_dispatch.route_choice import candidates_of, route_of

RATE_UNKNOWN_BYTES_PER_S = 125e6  # 1 Gbit/s, where nothing is known of any way
COMPUTE_OVER_STORAGE = (
    4.0  # the compute network's rate over the storage NIC's: a guess, for the hop
)

LEAST_LATENESS, SPLIT = "least_lateness", "split"


def choose_way(
    fetch: DispatchRequest, direct: RouteLoad, relays: Mapping[str, RouteLoad], policy: str
) -> ReadRoute:
    """The route by a policy of `objectcache_dispatch.POLICIES`: directly where nobody has room."""
    loads = [direct, *relays.values()]
    known = [load.rate_bytes_per_s for load in loads if load.rate_bytes_per_s]
    fastest = max(known, default=RATE_UNKNOWN_BYTES_PER_S)
    rates = np.array([load.rate_bytes_per_s or fastest for load in loads], np.float64)
    queue_bytes = np.array([load.queue_bytes for load in loads], np.float64)
    candidates = candidates_of(
        ["", *relays],
        0,
        None,
        queue_bytes / rates,
        rates,
        COMPUTE_OVER_STORAGE * rates,
        np.array([load.room_bytes for load in loads], np.float64),
    )
    route = route_of(fetch, candidates, POLICIES[policy])
    assert route is not None  # the direct way always has room
    return route
