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

from benchmarks.figures.experiment import NotPossible

PREFIX = "objectcache-"
MTU_BYTES = 9000  # frames as storage networks have them
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IP and TCP with timestamps
NEAR, FAR = "198.18.77.1", "198.18.77.2"  # of the range for benchmarks (RFC 2544)
BURST_S = 0.002
BURST_BYTES_MIN = 128 << 10  # a segment as the kernel hands it over must fit
QUEUE_S = 0.02


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """Both ends of the link; programs start within the namespace behind `within`."""

    namespace: str
    far_device: str
    address: str = FAR

    @property
    def within(self) -> tuple[str, ...]:
        """What to put before a command so that it runs on the far side."""
        return ("ip", "netns", "exec", self.namespace)

    def shape(self, rate_bytes_per_s: float | None) -> None:
        """Bound what the far side sends, payload bytes per second; None is no bound."""
        device = ("dev", self.far_device)
        if rate_bytes_per_s is None:
            with contextlib.suppress(NotPossible):  # there was none
                _run(*self.within, "tc", "qdisc", "del", *device, "root")
            return
        wire_rate = rate_bytes_per_s * (MTU_BYTES + 14) / (MTU_BYTES + 14 - HEADER_BYTES)
        burst_bytes = max(BURST_BYTES_MIN, round(wire_rate * BURST_S))
        shape = (
            *("rate", f"{round(8 * wire_rate)}bit"),
            *("burst", str(burst_bytes)),
            *("latency", f"{QUEUE_S * 1e3:g}ms"),
        )
        _run(*self.within, "tc", "qdisc", "replace", *device, "root", "tbf", *shape)


@contextmanager
def shaped_link() -> Generator[ShapedLink]:
    """A link without a bound; raises `NotPossible` with the reason where there can be none."""
    if os.geteuid() != 0:
        raise NotPossible("network namespaces need root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NotPossible(f"{program} is not installed; it is in the package iproute2")
    _remove_stale()
    namespace = f"{PREFIX}{os.getpid()}"
    near, far = f"oc{os.getpid()}n", f"oc{os.getpid()}f"
    try:
        _run("ip", "netns", "add", namespace)
        link = ShapedLink(namespace, far)
        mtu = ("mtu", str(MTU_BYTES))
        _run("ip", "link", "add", near, *mtu, "type", "veth", "peer", "name", far, *mtu)
        _run("ip", "link", "set", far, "netns", namespace)
        _run("ip", "address", "add", f"{NEAR}/30", "dev", near)
        _run("ip", "link", "set", near, "up")
        _run(*link.within, "ip", "address", "add", f"{FAR}/30", "dev", far)
        _run(*link.within, "ip", "link", "set", far, "up")
        _run(*link.within, "ip", "link", "set", "lo", "up")
        yield link
    finally:
        for words in (("link", "del", near), ("netns", "del", namespace)):
            with contextlib.suppress(NotPossible):  # it may not have been made
                _run("ip", *words)


def stale(namespaces: str) -> list[str]:
    """Of what `ip netns list` prints, ours of processes that are gone."""
    own = re.findall(rf"^{PREFIX}([0-9]+)\b", namespaces, re.MULTILINE)
    return [f"{PREFIX}{pid}" for pid in own if not os.path.exists(f"/proc/{pid}")]


def _remove_stale() -> None:
    for namespace in stale(_run("ip", "netns", "list")):
        _run("ip", "netns", "del", namespace)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotPossible(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout
