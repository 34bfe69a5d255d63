"""What hosts and their relays have registered, each under a lease of its own.

A node is what both say together: the host brings workers, the relay its landing memory and its
address, and its NICs' rates count where both name them. Neither undoes what the other said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from objectcache_dispatch import Node
from objectcache_gateway.dispatch_service.topology_file import node_of
from objectcache_schemas.operators.dispatch_api import NodeRegistration, RelayRegistration

T = TypeVar("T", NodeRegistration, RelayRegistration)


@dataclass(frozen=True, slots=True)
class _Leased(Generic[T]):
    registration: T
    lease_s: float
    ends_s: float


class Leases(Generic[T]):
    """Registrations of one kind, by node; time is an argument."""

    def __init__(self) -> None:
        self._leased: dict[str, _Leased[T]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._leased

    def __iter__(self) -> Iterator[str]:
        return iter(self._leased)

    def get(self, name: str) -> T | None:
        """What was registered last."""
        leased = self._leased.get(name)
        return None if leased is None else leased.registration

    def ends_s(self, name: str) -> float | None:
        """When its lease ends."""
        leased = self._leased.get(name)
        return None if leased is None else leased.ends_s

    def put(self, name: str, registration: T, lease_s: float, now_s: float) -> None:
        """Registered, or registered again."""
        self._leased[name] = _Leased(registration, lease_s, now_s + lease_s)

    def renew(self, name: str, now_s: float) -> None:
        """It was heard of; one that is not there stays so."""
        leased = self._leased.get(name)
        if leased is not None:
            self._leased[name] = replace(leased, ends_s=now_s + leased.lease_s)

    def drop(self, name: str) -> None:
        """It is gone; one that is not there stays so."""
        self._leased.pop(name, None)

    def drop_expired(self, now_s: float) -> list[str]:
        """Drops what nobody renewed; says which."""
        ended = [name for name, leased in self._leased.items() if leased.ends_s <= now_s]
        for name in ended:
            del self._leased[name]
        return ended

    def __repr__(self) -> str:
        return f"<Leases {len(self._leased)}>"


class NodeRegistry:
    """All nodes, with those of the topology file, whose figures are the file's."""

    def __init__(self, listed: Sequence[Node]) -> None:
        self.listed = {node.name: node for node in listed}
        self.hosts = Leases[NodeRegistration]()
        self.relays = Leases[RelayRegistration]()

    def node(self, name: str) -> Node | None:
        """What is registered under the name; None where nothing is."""
        return self.merged(name, self.hosts.get(name), self.relays.get(name))

    def merged(
        self, name: str, host: NodeRegistration | None, relay: RelayRegistration | None
    ) -> Node | None:
        """One node of both. Raises `InvalidRequest` as `Node` does."""
        if name in self.listed:
            return self.listed[name]
        node = None if host is None else node_of(name, host)
        if relay is None:
            return node
        return Node(
            name,
            relay.storage_nic_bytes_per_s,
            relay.compute_nic_bytes_per_s,
            relay.compute_nics,
            relay.memory_bytes_per_s or (node.memory_bytes_per_s if node else 0.0),
            relay.landing_bytes,
            node.workers if node else (),
        )

    def relay_url(self, name: str) -> str | None:
        """Where clients reach the node's relay, if one is registered."""
        relay = self.relays.get(name)
        return None if relay is None else relay.relay

    def relay_urls(self) -> list[tuple[str, str]]:
        """Every node whose relay is registered, by name, and where clients reach it."""
        named = ((name, self.relay_url(name)) for name in sorted(self.relays))
        return [(name, url) for name, url in named if url is not None]

    def is_of_another(self, name: str, url: str | None) -> bool:
        """Whether a relay of this URL is not the one that is registered; None names no relay."""
        return url is not None and url != self.relay_url(name)

    def renew_node(self, name: str, now_s: float) -> None:
        """The node's load came, which is its relay's to tell where it has one."""
        (self.relays if name in self.relays else self.hosts).renew(name, now_s)

    def lease_ends_s(self, name: str) -> float | None:
        """When the node is lost if nothing comes; None for one that has no lease."""
        ends = [self.hosts.ends_s(name), self.relays.ends_s(name)]
        known = [end for end in ends if end is not None]
        return max(known) if known and name not in self.listed else None

    def __repr__(self) -> str:
        return f"<NodeRegistry {self.hosts!r} of hosts, {self.relays!r} of relays>"
