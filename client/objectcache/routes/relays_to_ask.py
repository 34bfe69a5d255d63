"""Which of many relays a client asks how busy they are, and chooses among."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from functools import lru_cache

# Who asks few, and asks them often, waits less than who asks many seldom, and no more than who asks
# all: clients that all see the same relay idle would all go there (docs/dual_path.md).
ASKED_MAX = 6


def relays_to_ask(node: str, relays: Sequence[str], most: int = ASKED_MAX) -> frozenset[str]:
    """At most `most` of these names: the node's own relay, and others by rendezvous hashing, so
    that each is asked from about as many nodes, and one that comes or goes changes little.

    `node` is where the client runs; empty: it goes by its host's name.
    """
    if len(relays) <= most:
        return frozenset(relays)
    return frozenset(asking_order(node, relays)[:most])


def asking_order(node: str, relays: Sequence[str]) -> list[str]:
    """The same names in the order in which they are taken."""
    asker = node or socket.gethostname()
    return sorted(relays, key=lambda name: (name != node, _rank(asker, name)))


@lru_cache(4096)
def _rank(asker: str, relay: str) -> bytes:
    return hashlib.blake2b(f"{asker}\n{relay}".encode(), digest_size=8).digest()
