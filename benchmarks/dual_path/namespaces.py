"""Network namespaces of nodes: each has a storage link to `store` and a compute link to a switch.

Everything lies within these namespaces, so that names and addresses collide with nobody's, no
traffic leaves them, and removing them removes all. What a killed run has left is removed by the
next one: names have the process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.figures.experiment import NotPossible
from benchmarks.figures.shaped_link import (
    BURST_BYTES_MIN,
    MTU_BYTES,
    PREFIX,
    check_means,
    remove_stale,
    run_tool,
    wire_rate,
)

STORE, SWITCH = "store", "switch"
PREFILL = "p0"  # the node whose engine prefills
BRIDGE = "links"  # of the compute links
STORAGE_DEVICE, COMPUTE_DEVICE = "storage0", "compute0"  # of a node
COMPUTE_NETWORK = "10.2.0"
NODES_MAX = 9
KV_DSCP = 8  # CS1, lower effort
OTHER_CLASS, KV_CLASS = "1:10", "1:20"
OTHER_SHARE = 0.99  # of a compute link that both want
BURST_S = 0.002
CLASS_BURST_BYTES = 32 << 10  # that may pass an idle compute link faster than its rate
QUEUE_S = 0.2  # no frame is lost, as in storage networks with flow control


@dataclass(frozen=True, slots=True)
class Node:
    """A namespace with a storage NIC and a compute NIC."""

    name: str
    namespace: str
    number: int

    @property
    def within(self) -> tuple[str, ...]:
        """What to put before a command so that it runs on this node, and ends with this process."""
        return within(self.namespace)

    @property
    def store_address(self) -> str:
        """Of the store on its storage link, which is a network by itself."""
        return f"10.1.{self.number}.1"

    @property
    def compute_address(self) -> str:
        """How other nodes reach it."""
        return f"{COMPUTE_NETWORK}.{self.number}"


def within(namespace: str) -> tuple[str, ...]:
    """Words that run a command in a namespace, until this process ends at the latest."""
    return ("ip", "netns", "exec", namespace, "setpriv", "--pdeathsig", "KILL")


class NodeNetwork:
    """The namespaces of one run. Rates are of payload, in bytes a second; None is no bound."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` of nodes, in lower case. Nothing is made before `open`."""
        assert len(names) <= NODES_MAX
        self.nodes = {
            name: Node(name, _namespace(name), 11 + number) for number, name in enumerate(names)
        }
        self.store_within = within(_namespace(STORE))

    def open(self) -> None:
        """Make them. Raises `NotPossible`."""
        for name in (STORE, SWITCH):
            run_tool("ip", "netns", "add", _namespace(name))
            _ip(name, "link", "set", "lo", "up")
        _ip(SWITCH, "link", "add", BRIDGE, "mtu", str(MTU_BYTES), "type", "bridge")
        _ip(SWITCH, "link", "set", BRIDGE, "up")
        for node in self.nodes.values():
            run_tool("ip", "netns", "add", node.namespace)
            _ip(node.name, "link", "set", "lo", "up")
            _plug(node, STORAGE_DEVICE, STORE, f"10.1.{node.number}.2/30")
            _ip(STORE, "address", "add", f"{node.store_address}/30", "dev", node.name)
            _plug(node, COMPUTE_DEVICE, SWITCH, f"{node.compute_address}/24")
            _ip(SWITCH, "link", "set", node.name, "master", BRIDGE)

    def close(self) -> None:
        """Remove what there is."""
        for name in (*self.nodes, STORE, SWITCH):
            with contextlib.suppress(NotPossible):  # it may not have been made
                run_tool("ip", "netns", "del", _namespace(name))

    def shape_storage(self, name: str, rate_bytes_per_s: float | None) -> None:
        """Bound what a node reads of the store."""
        _bound(STORE, name, rate_bytes_per_s)

    def shape_compute(self, name: str, rate_bytes_per_s: float | None) -> None:
        """Bound what a node is sent by others, and what it sends: there KV by its DSCP has what
        everything else leaves, and one hundredth where that leaves nothing.
        """
        _bound(SWITCH, name, rate_bytes_per_s)
        _clear(name, COMPUTE_DEVICE)
        if rate_bytes_per_s is None:
            return
        tc = (*_TC, _namespace(name))
        device = ("dev", COMPUTE_DEVICE)
        rate = wire_rate(rate_bytes_per_s)
        run_tool(*tc, "qdisc", "add", *device, "root", "handle", "1:", "htb", "default", "10")
        ceil = ("ceil", f"{round(8 * rate)}bit", "quantum", str(1 << 16))
        burst = ("burst", str(CLASS_BURST_BYTES), "cburst", str(CLASS_BURST_BYTES))
        classes = (
            (OTHER_CLASS, OTHER_SHARE, "0"),
            (KV_CLASS, 1 - OTHER_SHARE, "1"),
        )
        whole = ("classid", "1:1", "htb", "rate", f"{round(8 * rate)}bit", *ceil, *burst)
        run_tool(*tc, "class", "add", *device, "parent", "1:", *whole)
        for name_of_class, share, priority in classes:
            own = ("htb", "rate", f"{round(8 * rate * share)}bit", *ceil, *burst)
            place = ("parent", "1:1", "classid", name_of_class)
            run_tool(*tc, "class", "add", *device, *place, *own, "prio", priority)
        marked = ("match", "ip", "tos", hex(KV_DSCP << 2), "0xfc", "flowid", KV_CLASS)
        of_ip = ("parent", "1:", "protocol", "ip", "u32")
        run_tool(*tc, "filter", "add", *device, *of_ip, *marked)

    def storage_bytes(self, name: str) -> int:
        """What the store has sent to a node, headers included, as the kernel counts it."""
        return self._sent_bytes(STORE, name)

    def compute_bytes(self, name: str) -> int:
        """What other nodes have sent to a node, the same."""
        return self._sent_bytes(SWITCH, name)

    def marked_bytes(self, name: str) -> int:
        """What a node has sent as KV by its DSCP, since its compute link was shaped."""
        tc = (*_TC, _namespace(name))
        shown = run_tool(*tc, "-s", "class", "show", "dev", COMPUTE_DEVICE)
        found = re.search(rf"class htb {KV_CLASS} .*\n Sent ([0-9]+) bytes", shown)
        assert found is not None, shown
        return int(found[1])

    def _sent_bytes(self, namespace: str, device: str) -> int:
        (printed,) = json.loads(
            run_tool("ip", "-n", _namespace(namespace), "-s", "-j", "link", "show", "dev", device)
        )
        return int(printed["stats64"]["tx"]["bytes"])

    def __repr__(self) -> str:
        return f"<NodeNetwork {' '.join(self.nodes)}>"


_TC = ("tc", "-n")


def _namespace(name: str) -> str:
    return f"{PREFIX}{os.getpid()}-{name}"


def _ip(name: str, *words: str) -> None:
    run_tool("ip", "-n", _namespace(name), *words)


def _plug(node: Node, device: str, into: str, address: str) -> None:
    """A link from a node, whose other end has the node's name."""
    mtu = ("mtu", str(MTU_BYTES))
    peer = ("peer", "name", node.name, *mtu, "netns", _namespace(into))
    _ip(node.name, "link", "add", device, *mtu, "type", "veth", *peer)
    _ip(into, "link", "set", node.name, "up")
    _ip(node.name, "address", "add", address, "dev", device)
    _ip(node.name, "link", "set", device, "up")


def _bound(name: str, device: str, rate_bytes_per_s: float | None) -> None:
    if rate_bytes_per_s is None:
        _clear(name, device)
        return
    rate = wire_rate(rate_bytes_per_s)
    shape = (
        *("rate", f"{round(8 * rate)}bit"),
        *("burst", str(_burst_bytes(rate))),
        *("latency", f"{QUEUE_S * 1e3:g}ms"),
    )
    root = ("dev", device, "root")
    run_tool(*_TC, _namespace(name), "qdisc", "replace", *root, "tbf", *shape)


def _clear(name: str, device: str) -> None:
    with contextlib.suppress(NotPossible):  # there was no bound
        run_tool(*_TC, _namespace(name), "qdisc", "del", "dev", device, "root")


def _burst_bytes(rate: float) -> int:
    return max(BURST_BYTES_MIN, round(rate * BURST_S))


@contextmanager
def node_network(names: Sequence[str]) -> Generator[NodeNetwork]:
    """The nodes with links that have no bound; raises `NotPossible` with the reason where there can
    be none.
    """
    check_means()
    if shutil.which("setpriv") is None:
        raise NotPossible("setpriv is not installed; it is in the package util-linux")
    remove_stale()
    network = NodeNetwork(names)
    try:
        network.open()
        yield network
    finally:
        network.close()
