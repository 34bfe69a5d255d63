"""What a relay's node is called, to servers and to the dispatch service."""

from __future__ import annotations

import re
import socket

from objectcache_runtime.settings import RelaySettings
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import NAME_PATTERN, NAME_WORDS


def node_of(relay: RelaySettings) -> str:
    """What this node is called: relay.node, or the host's name. Raises `InvalidRequest` for what no
    header could carry.
    """
    node = relay.node or socket.gethostname()
    if not re.match(NAME_PATTERN, node):
        raise InvalidRequest(f"relay.node must be {NAME_WORDS}, got {node!r}")
    return node
