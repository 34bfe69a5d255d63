"""NUMA nodes of the host: which of them a GPU is nearest to, and memory that is put there.

A GPU's link is as quick as its host memory is near (MMA, section 5.1.1: what is between the nodes
bounds links of the other one). Not run on a machine with several nodes.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_Thing = TypeVar("_Thing")
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_PREFERRED = 1  # linux/mempolicy.h: of this node, and of others where it has no more
_MOVE = 2  # pages, too, that are there already
_NODE_OF_ADDRESS = 3
_NODES_MAX = 1024
_WORD_BITS = 64
_HERE, _ELSEWHERE, _ANYWHERE = 10, 255, 256  # distances as the kernel gives them; the last is ours


@dataclass(frozen=True, slots=True)
class HostNodes:
    """What Linux says of them, in the folder that it has at `/sys`."""

    sysfs: Path = Path("/sys")

    def node_of_pci(self, address: str) -> int | None:
        """The node that a PCI device ("0000:1b:00.0") is nearest to; None where nobody says."""
        try:
            file = self.sysfs / "bus/pci/devices" / address.lower() / "numa_node"
            node = int(file.read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None

    def distance(self, node: int, other: int) -> int:
        """10 is to itself, and twice as much twice as slow; 255 is one of which nobody says."""
        if node == other:
            return _HERE
        folder = self.sysfs / "devices/system/node"
        try:
            listed = (folder / f"node{node}/distance").read_text().split()
            known = _listed((folder / "online").read_text())
            return int(listed[known.index(other)])
        except (OSError, ValueError, IndexError):
            return _ELSEWHERE

    def nearest_first(
        self, node: int | None, things: Iterable[_Thing], node_of: Callable[[_Thing], int | None]
    ) -> list[_Thing]:
        """The things in the order of their nodes' distances, else in theirs; behind all others
        those of which no node is known.
        """
        if node is None:
            return list(things)

        def distance(thing: _Thing) -> int:
            other = node_of(thing)
            return _ANYWHERE if other is None else self.distance(node, other)

        return sorted(things, key=distance)


def put_on_node(address: int, length_bytes: int, node: int) -> str | None:
    """Have whole pages of this process come from a node's memory, and move there what lies
    elsewhere and nobody else has written to. Returns why not, or None.
    """
    if not 0 <= node < _NODES_MAX:
        return f"there is no NUMA node {node}"
    mask = (ctypes.c_uint64 * (_NODES_MAX // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    bits = ctypes.c_ulong(_NODES_MAX + 1)  # the kernel takes one off
    where = ctypes.c_void_p(address), ctypes.c_ulong(length_bytes)
    return _system_call(_MBIND, *where, _PREFERRED, mask, bits, _MOVE)


def node_at(address: int) -> int | None:
    """The node whose memory has a byte of this process; None where the system does not say."""
    node = ctypes.c_int(-1)
    at = ctypes.c_void_p(address)
    nobody = ctypes.c_void_p(None), ctypes.c_ulong(0)
    why_not = _system_call(_GET_MEMPOLICY, ctypes.byref(node), *nobody, at, _NODE_OF_ADDRESS)
    return node.value if why_not is None else None


def _system_call(numbers: dict[str, int], *arguments: object) -> str | None:
    number = numbers.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return f"not known on {platform.system()} {platform.machine()}"
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments) == 0:
        return None
    return os.strerror(ctypes.get_errno())


def _listed(text: str) -> list[int]:
    """Numbers of a list as the kernel writes it: "0-2,4"."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
