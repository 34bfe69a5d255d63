"""What the links carried, by the kernel's counts, against what was delivered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from benchmarks.dual_path.namespaces import PREFILL, NodeNetwork
from benchmarks.dual_path.node_side import DIRECT, over
from benchmarks.dual_path.prefixes import PromptShape
from objectcache_schemas.limits import KIB

HEADERS = 0.03  # of the payload: of Ethernet, IP, TCP, HTTP and NIXL in frames of 9000 bytes
ACKNOWLEDGEMENTS = 0.01  # of what goes the other way
SPLIT_PREFIX = "split:"
BESIDE_BYTES = 256 * KIB  # connections, sessions and answers


class CarriedWrongly(Exception):
    """A link carried something else than the deliveries over it."""


def bytes_by_route(routes: Iterable[str], payload_bytes: int, chunk_count: int) -> Counter[str]:
    """Payload over each route, by the routes that deliveries say that they took: `direct`,
    `relay:d0`, or `split:direct=9,relay:d0=7`, in chunks.
    """
    by_route: Counter[str] = Counter()
    for route in routes:
        parts = route.removeprefix(SPLIT_PREFIX)
        if parts == route:
            by_route[route] += payload_bytes
            continue
        for part in parts.split(","):
            name, _, count = part.rpartition("=")
            by_route[name] += int(count) * payload_bytes // chunk_count
    return by_route


class Carried:
    """Bytes over each node's links since it was made; headers are in them."""

    def __init__(self, network: NodeNetwork) -> None:
        self._network = network
        self._storage = self._counts(network.storage_bytes)
        self._compute = self._counts(network.compute_bytes)

    def storage(self) -> dict[str, int]:
        """By nodes, out of the store."""
        now = self._counts(self._network.storage_bytes)
        return {name: count - self._storage[name] for name, count in now.items()}

    def compute(self) -> dict[str, int]:
        """By nodes, out of other nodes."""
        now = self._counts(self._network.compute_bytes)
        return {name: count - self._compute[name] for name, count in now.items()}

    def check(self, storage: Mapping[str, int], compute: Mapping[str, int]) -> None:
        """Raise `CarriedWrongly` unless links carried so many bytes of payload; a node that is not
        named, none.
        """
        acknowledged = ACKNOWLEDGEMENTS * sum(compute.values())
        for kind, counts, payloads in (
            ("storage", self.storage(), storage),
            ("compute", self.compute(), compute),
        ):
            for name, count in counts.items():
                check_count(
                    f"the {kind} link of {name}", count, payloads.get(name, 0), acknowledged
                )

    def check_routes(self, routes: Iterable[str], shape: PromptShape) -> None:
        """Raise `CarriedWrongly` unless links carried deliveries to the prefill node that took
        these routes.
        """
        by_route = bytes_by_route(routes, shape.payload_bytes, shape.chunk_count)
        relayed = {
            node: by_route[over(node)] for node in self._network.nodes if over(node) in by_route
        }
        self.check({PREFILL: by_route[DIRECT], **relayed}, {PREFILL: sum(relayed.values())})

    def _counts(self, count: Callable[[str], int]) -> dict[str, int]:
        return {name: count(name) for name in self._network.nodes}


def check_count(link: str, count: int, payload_bytes: int, beside_bytes: float = 0.0) -> None:
    """Raise `CarriedWrongly` unless a link that carried `count` bytes may have carried the payload
    once, with its headers, and `beside_bytes`.
    """
    most = payload_bytes * (1 + HEADERS) + BESIDE_BYTES + beside_bytes
    if not payload_bytes <= count <= most:
        raise CarriedWrongly(f"{link} carried {count} bytes for {payload_bytes} of payload")
