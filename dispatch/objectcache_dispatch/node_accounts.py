"""What each node has to read, and how much of its landing memory is taken.

A storage NIC is taken to read what it was asked for at its rate, so a queue is kept as the time at
which it will have been read: `busy_until_s`. A report sets that time, and what was asked for after
it is added. No more can wait than was asked for and is not read yet, which bounds it when a
reader says that it is done.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from objectcache_dispatch.loads import NodeLoad
from objectcache_dispatch.prefill_choice import Floats
from objectcache_dispatch.route_choice import Candidates
from objectcache_dispatch.topology import Topology
from objectcache_dispatch.worker_accounts import REPORT_AGE_S_MAX

RECENT_S = 1.0  # in which what was given to a NIC counts for a third of it
RECENT_EXPONENT_MAX = 200.0  # of sums that are kept undecayed
WAYS_MAX = 1024  # that are kept


class _Account:
    """Of one node, in bytes."""

    __slots__ = ("foreign_bytes", "landing_bytes", "landings", "own_bytes", "own_landing", "reads")

    def __init__(self) -> None:
        self.own_bytes, self.own_landing = 0, 0  # given by this dispatcher, and not over
        self.foreign_bytes = 0  # to read beside those, by the last report
        self.landing_bytes = 0  # the last report's, with what changed since
        # What changed after the last report: (when, bytes), negative once they are over.
        self.reads, self.landings = deque[tuple[float, int]](), deque[tuple[float, int]]()


class _Ways(NamedTuple):
    """From other nodes to a prefill worker's: what of `Candidates` is always the same. `among` are
    the nodes, of which `direct` is the place of the prefill worker's own.
    """

    among: NDArray[np.int64] | slice
    direct: int
    names: list[str]
    rate_bytes_per_s: Floats
    hop_s_per_byte: Floats


class NodeAccounts:
    """All nodes, in the topology's order; arrays are float64[nodes].

    `rate_bytes_per_s` is the storage NIC's, at most what was measured; 1 where there is none, and
    then `busy_until_s` is infinite, as that of a dead node is.
    """

    def __init__(self, topology: Topology) -> None:
        nodes = topology.nodes
        self.names = [node.name for node in nodes]
        self.index = {node.name: index for index, node in enumerate(nodes)}
        self.nominal_bytes_per_s = [float(node.storage_nic_bytes_per_s) for node in nodes]
        self.compute_bytes_per_s = np.array([float(node.compute_nic_bytes_per_s) for node in nodes])
        self.landing_bytes = np.array([float(node.landing_bytes) for node in nodes])
        self.rate_bytes_per_s = np.array([rate or 1.0 for rate in self.nominal_bytes_per_s])
        self.busy_until_s = np.zeros(len(nodes))
        self._promised_bytes = np.zeros(len(nodes))
        self._promises = 0
        self.landing_used = np.zeros(len(nodes))
        self.reported_s = np.full(len(nodes), -np.inf)
        self.is_alive = np.ones(len(nodes), np.bool_)
        # Seconds given to each NIC, each at exp(its time / RECENT_S): to decay all is one factor.
        self._recent = np.zeros(len(nodes))
        self._recent_since_s = 0.0
        self._ways = dict[tuple[int, int | None], _Ways]()
        self._accounts = [_Account() for _ in nodes]
        for node, rate in enumerate(self.nominal_bytes_per_s):
            if not rate:
                self.busy_until_s[node] = np.inf

    def take_over(self, former: NodeAccounts, now_s: float) -> None:
        """What is known of nodes that the topology before this one had, too. The bytes of a queue
        stay where a NIC's rate is another; no promise may be left on a node that is gone.
        """
        self._promises = former._promises
        for name in self.index.keys() & former.index.keys():
            node, before = self.index[name], former.index[name]
            self._accounts[node] = former._accounts[before]
            self._promised_bytes[node] = former._promised_bytes[before]
            self.landing_used[node] = former.landing_used[before]
            self.reported_s[node] = former.reported_s[before]
            self.is_alive[node] = former.is_alive[before]
            nominal = self.nominal_bytes_per_s[node]
            if not former.is_alive[before]:
                self.busy_until_s[node] = np.inf
            elif nominal:
                if nominal == former.nominal_bytes_per_s[before]:
                    self.rate_bytes_per_s[node] = former.rate_bytes_per_s[before]
                queue_s = former.queue_bytes(before, now_s) / float(self.rate_bytes_per_s[node])
                self.busy_until_s[node] = now_s + queue_s

    def busy_s(self, now_s: float) -> Floats:
        """How long each NIC is busy; infinite where nothing can be read."""
        busy: Floats = np.maximum(self.busy_until_s - now_s, 0)
        return busy

    def candidates(
        self,
        direct: int,
        decode: int | None,
        now_s: float,
        report_age_s_max: float,
        *,
        any_node: bool,
    ) -> Candidates:
        """Who could read for a prefill worker on node `direct`: every node, or the paper's two. A
        node whose last report is older than that cannot, but for the direct one.
        """
        key = direct, None if any_node else (direct if decode is None else decode)
        ways = self._ways.get(key)
        if ways is None:
            ways = self._find_ways(*key)
        among, place = ways.among, ways.direct
        busy_s = np.maximum(self.busy_until_s[among] - now_s, 0)
        room_bytes = self.landing_bytes[among] - self.landing_used[among]
        room_bytes[place] = np.inf
        if report_age_s_max < np.inf:
            is_stale = self.reported_s[among] < now_s - report_age_s_max
            is_stale[place] = False
            busy_s[is_stale] = np.inf
        relay = decode if any_node else len(ways.names) - 1
        return Candidates(
            ways.names,
            place,
            None if relay == place else relay,
            busy_s,
            ways.rate_bytes_per_s,
            ways.hop_s_per_byte,
            room_bytes,
            self._recent[among] * (1 / self._recent_scale(now_s)),
        )

    def _find_ways(self, direct: int, decode: int | None) -> _Ways:
        """Kept until a rate changes."""
        if decode is None:
            among, place = np.arange(len(self.names)), direct
        else:
            among, place = np.array([direct] if decode == direct else [direct, decode]), 0
        compute = np.minimum(self.compute_bytes_per_s[among], self.compute_bytes_per_s[direct])
        rates = np.minimum(self.rate_bytes_per_s[among], compute)
        rates[place] = self.rate_bytes_per_s[direct]
        hops = 1 / compute
        hops[place] = 0.0
        names = [self.names[node] for node in among.tolist()]
        found = _Ways(slice(None) if decode is None else among, place, names, rates, hops)
        if len(self._ways) >= WAYS_MAX:
            self._ways.clear()
        self._ways[direct, decode] = found
        return found

    def _recent_scale(self, now_s: float) -> float:
        """What a second that is given now counts in `_recent`."""
        exponent = (now_s - self._recent_since_s) / RECENT_S
        if exponent > RECENT_EXPONENT_MAX:
            self._recent *= math.exp(-exponent)
            self._recent_since_s, exponent = now_s, 0.0
        return math.exp(exponent)

    def queue_s(self, now_s: float) -> Floats:
        """The same with what is promised."""
        busy = self.busy_s(now_s)
        return busy + self._promised_bytes / self.rate_bytes_per_s if self._promises else busy

    def promise(self, node: int, read_bytes: int) -> None:
        """A request's prefill worker is there, while its route is not known yet."""
        self._promised_bytes[node] += read_bytes
        self._promises += 1

    def keep_promise(self, node: int, read_bytes: int) -> None:
        """Its route is known now, or not needed any more."""
        self._promised_bytes[node] -= read_bytes
        self._promises -= 1

    def queue_bytes(self, node: int, now_s: float) -> float:
        """What a node has to read by now, as far as it is known; 0 of a dead one."""
        busy_s = max(0.0, float(self.busy_until_s[node]) - now_s)
        return busy_s * float(self.rate_bytes_per_s[node]) if busy_s < np.inf else 0.0

    def read(self, node: int, read_bytes: int, now_s: float) -> None:
        """It is asked to read these bytes."""
        account = self._accounts[node]
        account.own_bytes += read_bytes
        _keep(account.reads, now_s, read_bytes)
        begin_s = max(self.busy_until_s.item(node), now_s)
        taken_s = read_bytes / self.rate_bytes_per_s.item(node)
        self.busy_until_s[node] = begin_s + taken_s
        self._recent[node] += taken_s * self._recent_scale(now_s)

    def has_read(self, node: int, read_bytes: int, now_s: float) -> None:
        """It has read them, or need not any more."""
        account = self._accounts[node]
        account.own_bytes -= read_bytes
        _keep(account.reads, now_s, -read_bytes)
        busy_until_s = self.busy_until_s.item(node)
        if busy_until_s < np.inf:
            left_bytes = account.own_bytes + account.foreign_bytes
            left_s = left_bytes / self.rate_bytes_per_s.item(node)
            self.busy_until_s[node] = min(busy_until_s, now_s + left_s)

    def land(self, node: int, landing_bytes: int, now_s: float) -> None:
        """So much landing memory is taken, or given back if negative."""
        account = self._accounts[node]
        account.own_landing += landing_bytes
        account.landing_bytes += landing_bytes
        _keep(account.landings, now_s, landing_bytes)
        self.landing_used[node] = max(account.own_landing, account.landing_bytes)

    def report(self, load: NodeLoad, now_s: float) -> None:
        """Keeps what changed after it; ignores one that is older than the last, or too old."""
        node = self.index[load.node]
        if load.reported_s < max(float(self.reported_s[node]), now_s - REPORT_AGE_S_MAX):
            return
        self.reported_s[node] = load.reported_s
        account = self._accounts[node]
        _forget(account.reads, load.reported_s)
        _forget(account.landings, load.reported_s)
        account.landing_bytes = load.landing_bytes_used + sum(n for _, n in account.landings)
        self.landing_used[node] = max(account.own_landing, account.landing_bytes)
        nominal = self.nominal_bytes_per_s[node]
        if not nominal:
            return
        rate = min(nominal, load.rate_bytes_per_s or nominal)
        self._set_rate(node, rate)
        own_then = account.own_bytes - sum(n for _, n in account.reads)
        account.foreign_bytes = max(0, load.read_queue_bytes - own_then)
        asked_since = sum(n for _, n in account.reads if n > 0)
        self.busy_until_s[node] = min(
            load.reported_s + (load.read_queue_bytes + asked_since) / rate,
            now_s + (account.own_bytes + account.foreign_bytes) / rate,
        )

    def bury(self, node: int) -> None:
        """It is dead; what was given to it must have been taken back."""
        self._accounts[node] = _Account()
        self.is_alive[node] = False
        self.busy_until_s[node] = np.inf
        self.landing_used[node] = 0.0

    def revive(self, node: int) -> None:
        """It runs again, and has nothing."""
        self.is_alive[node] = True
        if self.nominal_bytes_per_s[node]:
            self.busy_until_s[node] = 0.0
            self._set_rate(node, self.nominal_bytes_per_s[node])

    def _set_rate(self, node: int, rate_bytes_per_s: float) -> None:
        if self.rate_bytes_per_s.item(node) != rate_bytes_per_s:
            self.rate_bytes_per_s[node] = rate_bytes_per_s
            self._ways.clear()


def _keep(changes: deque[tuple[float, int]], now_s: float, amount: int) -> None:
    changes.append((now_s, amount))
    too_old_s = now_s - REPORT_AGE_S_MAX
    while changes[0][0] <= too_old_s:
        changes.popleft()


def _forget(changes: deque[tuple[float, int]], until_s: float) -> None:
    while changes and changes[0][0] <= until_s:
        changes.popleft()
