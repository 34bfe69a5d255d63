"""Nodes that are listed in a file, and need not register: dispatch.topology."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from objectcache_dispatch import ClusterWorker, Node
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.operators.dispatch_api import DispatchName, NodeRegistration


class _ListedNode(NodeRegistration, frozen=True, kw_only=True):
    name: DispatchName


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: tuple[_ListedNode, ...]


def read_topology(file: Path) -> tuple[Node, ...]:
    """The tables [[nodes]], each with a name, the fields of `NodeRegistration` but for the lease,
    and [[nodes.workers]]. Raises `InvalidRequest` naming the file and the field.
    """
    try:
        found = msgspec.convert(tomllib.loads(file.read_text("utf-8")), _File)
    except OSError as error:
        raise InvalidRequest(f"dispatch.topology {file}: {error.strerror}") from error
    except (ValueError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"dispatch.topology {file}: {error}") from error
    for listed in found.nodes:
        if listed.lease_s is not None:
            raise InvalidRequest(
                f"dispatch.topology {file}: lease_s of node {listed.name}; a listed node has none"
            )
    return tuple(node_of(listed.name, listed) for listed in found.nodes)


def node_of(name: str, registration: NodeRegistration) -> Node:
    """The library's node. Raises `InvalidRequest` as that does."""
    return Node(
        name,
        registration.storage_nic_bytes_per_s,
        registration.compute_nic_bytes_per_s,
        registration.compute_nics,
        registration.memory_bytes_per_s,
        registration.landing_bytes,
        tuple(
            ClusterWorker(w.name, w.role, w.group, w.kv_capacity_tokens)
            for w in registration.workers
        ),
    )
