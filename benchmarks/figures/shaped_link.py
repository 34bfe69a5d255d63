"""A network namespace behind a link of this host's own, whose rate the kernel bounds.

Whatever a killed run has left is removed by the next one: names end with the process id.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures.experiment import NotPossible

PREFIX = "objectcache-"
MTU_BYTES = 9000  # frames as storage networks have them
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP and TCP with timestamps
NETWORKS = 512  # of 256 addresses, in the range for benchmarks, 198.18.0.0/15 (RFC 2544)
LINKS_MAX = 64  # of a process, each with four addresses of the process' network
BURST_S = 0.002
BURST_BYTES_MIN = 128 << 10  # a segment as the kernel hands it over must fit
QUEUE_S = 0.02


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """Both ends of the link; programs start within the namespace behind `within`."""

    namespace: str
    near_device: str
    far_device: str
    near_address: str
    address: str  # of the far side

    @property
    def within(self) -> tuple[str, ...]:
        """What to put before a command so that it runs on the far side."""
        return ("ip", "netns", "exec", self.namespace)

    def shape(self, rate_bytes_per_s: float | None, queue_s: float = QUEUE_S) -> None:
        """Bound what the far side sends, payload bytes per second; None is no bound. Frames that
        would wait for longer than `queue_s` are lost.
        """
        _shape(self.within, self.far_device, rate_bytes_per_s, queue_s)

    def shape_inbound(self, rate_bytes_per_s: float | None) -> None:
        """The same of what the far side is sent."""
        _shape((), self.near_device, rate_bytes_per_s, QUEUE_S)

    def inbound_bytes(self) -> int:
        """What the far side has been sent, headers included."""
        count = Path("/sys/class/net") / self.near_device / "statistics" / "tx_bytes"
        return int(count.read_text())


def _shape(
    within: tuple[str, ...], name: str, rate_bytes_per_s: float | None, queue_s: float
) -> None:
    device = ("dev", name)
    if rate_bytes_per_s is None:
        with contextlib.suppress(NotPossible):  # there was none
            run_tool(*within, "tc", "qdisc", "del", *device, "root")
        return
    rate = wire_rate(rate_bytes_per_s)
    burst_bytes = max(BURST_BYTES_MIN, round(rate * BURST_S))
    shape = (
        *("rate", f"{round(8 * rate)}bit"),
        *("burst", str(burst_bytes)),
        *("latency", f"{queue_s * 1e3:g}ms"),
    )
    run_tool(*within, "tc", "qdisc", "replace", *device, "root", "tbf", *shape)


@contextmanager
def shaped_link(number: int = 0) -> Generator[ShapedLink]:
    """A link without a bound, the first of this process or one more; raises `NotPossible` with the
    reason where there can be none.
    """
    assert number < LINKS_MAX
    check_means()
    remove_stale()
    namespace = f"{PREFIX}{os.getpid()}" + (f"-{number}" if number else "")
    near, far = f"oc{os.getpid()}n{number}", f"oc{os.getpid()}f{number}"
    network = free_network(run_tool("ip", "-4", "-oneline", "address"), os.getpid())
    near_address, address = (f"{network}.{4 * number + last}" for last in (1, 2))
    try:
        run_tool("ip", "netns", "add", namespace)
        link = ShapedLink(namespace, near, far, near_address, address)
        mtu = ("mtu", str(MTU_BYTES))
        run_tool("ip", "link", "add", near, *mtu, "type", "veth", "peer", "name", far, *mtu)
        run_tool("ip", "link", "set", far, "netns", namespace)
        run_tool("ip", "address", "add", f"{near_address}/30", "dev", near)
        run_tool("ip", "link", "set", near, "up")
        run_tool(*link.within, "ip", "address", "add", f"{address}/30", "dev", far)
        run_tool(*link.within, "ip", "link", "set", far, "up")
        run_tool(*link.within, "ip", "link", "set", "lo", "up")
        yield link
    finally:
        for words in (("link", "del", near), ("netns", "del", namespace)):
            with contextlib.suppress(NotPossible):  # it may not have been made
                run_tool("ip", *words)


def check_means() -> None:
    """Raise `NotPossible` with what namespaces and links need here and do not have."""
    if os.geteuid() != 0:
        raise NotPossible("network namespaces need root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NotPossible(f"{program} is not installed; it is in the package iproute2")


def wire_rate(rate_bytes_per_s: float) -> float:
    """Bytes a second, Ethernet's header included, of so many bytes a second of payload."""
    frame_bytes = MTU_BYTES + 14
    return rate_bytes_per_s * frame_bytes / (frame_bytes - HEADER_BYTES)


def free_network(addresses: str, pid: int) -> str:
    """The first three numbers of a process' addresses, by what `ip -4 -oneline address` prints:
    none that a link of another process has.
    """
    taken = {
        network
        for owner, network in re.findall(
            r"\boc([0-9]+)n[0-9]+ +inet ([0-9]+\.[0-9]+\.[0-9]+)", addresses
        )
        if int(owner) != pid
    }
    wanted = (
        f"198.{18 + n // 256}.{n % 256}" for n in ((pid + k) % NETWORKS for k in range(NETWORKS))
    )
    network = next((network for network in wanted if network not in taken), None)
    if network is None:
        raise NotPossible("all networks of 198.18.0.0/15 are in use")
    return network


def stale(namespaces: str) -> list[str]:
    """Of what `ip netns list` prints, ours of processes that are gone."""
    own = re.findall(rf"^({PREFIX}([0-9]+)(?:-[a-z0-9]+)?)\b", namespaces, re.MULTILINE)
    return [name for name, pid in own if not os.path.exists(f"/proc/{pid}")]


def remove_stale() -> None:
    """Remove what killed runs have left."""
    for namespace in stale(namespaces()):
        with contextlib.suppress(NotPossible):  # another process may have removed it meanwhile
            run_tool("ip", "netns", "del", namespace)


def namespaces() -> str:
    """All that there are, one in each line."""
    return run_tool("ip", "netns", "list")


def own_namespaces() -> list[str]:
    """Those that this process has made, and not removed."""
    return re.findall(rf"^({PREFIX}{os.getpid()}(?:-[a-z0-9]+)?)\b", namespaces(), re.MULTILINE)


def run_tool(*words: str) -> str:
    """What a program prints. Raises `NotPossible` with what it says where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPossible(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
