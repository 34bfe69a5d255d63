"""Who serves a turn: the dispatcher's own code, with the paper's workers or with turns by turn.

Routes that the paper compares itself with are policies like the dispatcher's: `direct_only` is a
single path, `alternating` its dual path before scheduling.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from objectcache_dispatch import (
    Candidates,
    ClusterDispatcher,
    Decision,
    DispatchRequest,
    DispatchSettings,
    PartShare,
    RoutePolicy,
    Topology,
    least_lateness,
    shorter_queue,
    split,
)
from objectcache_schemas.errors import InvalidRequest

FETCH_S = 0.05  # how often groups fetch while something waits
LEASE_S = 1e9  # none ends: every request does


@dataclass(frozen=True, slots=True)
class Placing:
    """`policy` makes a route policy for one run. Workers are those of section 6.1, or in turn;
    `any_node` lets nodes relay that have neither of a request's workers.
    """

    title: str
    policy: Callable[[], RoutePolicy]
    is_scheduled: bool
    any_node: bool = False


def direct_only() -> RoutePolicy:
    """The prefill worker's node reads, always."""

    def policy(request: DispatchRequest, candidates: Candidates) -> list[PartShare]:
        return (
            [] if candidates.direct is None else [PartShare(candidates.direct, request.read_bytes)]
        )

    return policy


def alternating() -> RoutePolicy:
    """Each request of a pair of nodes over the other side than the one before; direct where a relay
    has no room. Of a pair, since workers are taken in turn, too: one count over all requests would
    always meet the same nodes on the same side.
    """
    relayed: dict[tuple[str, str], bool] = {}

    def policy(request: DispatchRequest, candidates: Candidates) -> list[PartShare]:
        direct, decode = candidates.direct, candidates.decode
        assert direct is not None
        if decode is None:
            return [PartShare(direct, request.read_bytes)]
        pair = candidates.names[direct], candidates.names[decode]
        is_relayed = relayed[pair] = not relayed.get(pair, True)
        has_room = candidates.room_bytes[decode] >= request.read_bytes
        return [PartShare(decode if is_relayed and has_room else direct, request.read_bytes)]

    return policy


PLACINGS: Mapping[str, Placing] = {
    "single": Placing("single path", direct_only, is_scheduled=False),
    "single_scheduled": Placing("single path, scheduled", direct_only, is_scheduled=True),
    "round_robin": Placing("dual path, round robin", alternating, is_scheduled=False),
    "paper": Placing("dual path, paper's policy", lambda: shorter_queue, is_scheduled=True),
    "least_lateness": Placing("least lateness", lambda: least_lateness, is_scheduled=True),
    "split": Placing("split over both sides", lambda: split, is_scheduled=True),
    "any_node": Placing(
        "least lateness, any node", lambda: least_lateness, is_scheduled=True, any_node=True
    ),
    "split_any_node": Placing(
        "split over any two nodes", lambda: split, is_scheduled=True, any_node=True
    ),
}


def placing_named(name: str) -> Placing:
    """Raises `InvalidRequest` for a name that is not there."""
    if name not in PLACINGS:
        raise InvalidRequest(f"routes {name!r} are not known; of {', '.join(PLACINGS)}")
    return PLACINGS[name]


class ClusterPlacement:
    """Requests in, decisions out at the next fetch. The dispatcher is told of every end, so it
    counts what workers and nodes would report, and nothing is older than its last event.
    """

    def __init__(self, topology: Topology, placing: Placing, beta_tokens: float) -> None:
        settings = DispatchSettings(
            beta_tokens=beta_tokens, any_node=placing.any_node, lease_s=LEASE_S
        )
        self.dispatcher = ClusterDispatcher(topology, settings, placing.policy())
        self.is_scheduled = placing.is_scheduled
        self.waiting = 0
        self._prefill_groups = len(topology.groups("prefill"))
        self._first = 0
        self._prefill_turns = itertools.cycle(_across_nodes(topology, "prefill"))
        self._decode_turns = itertools.cycle(_across_nodes(topology, "decode"))

    def submit(self, request: DispatchRequest, now_s: float) -> Decision | None:
        """The decision at once where workers are taken in turn; else None, until a fetch."""
        if self.is_scheduled:
            self.dispatcher.submit(request, now_s)
            self.waiting += 1
            return None
        decision = self.dispatcher.route(
            request, next(self._prefill_turns), next(self._decode_turns), now_s
        )
        assert decision is not None, "the direct route is always there"
        return decision

    def fetch(self, now_s: float) -> list[Decision]:
        """All groups fetch: decode before prefill, which is told of both, another one first each
        time.
        """
        found = self.dispatcher.fetch_all(now_s, self._first)
        self._first = (self._first + 1) % self._prefill_groups
        self.waiting -= len(found)
        return found


def _across_nodes(topology: Topology, role: str) -> list[str]:
    """Workers of a role, one of each node, then the next of each."""
    of_nodes = [
        [worker.name for worker in node.workers if worker.role == role] for node in topology.nodes
    ]
    rows = itertools.zip_longest(*(names for names in of_nodes if names))
    return [name for row in rows for name in row if name is not None]
