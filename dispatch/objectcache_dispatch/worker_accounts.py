"""What each worker has: its last report, and what was given to it and taken back since.

A report is as old as its `reported_s` says, so what changed after that is added to it. What this
dispatcher gave and nobody has finished is there for certain, so no load is counted as less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from objectcache_dispatch.loads import WorkerLoad
from objectcache_dispatch.topology import ClusterWorker, Role, Topology

REPORT_AGE_S_MAX = 10.0  # an older report is ignored: what changed since is no longer known


Change = tuple[float, int, int]  # of a worker's load: when, seq, tok


class _Account:
    """`seq` and `tok` are the last report's with what changed since."""

    __slots__ = ("changes", "own_seq", "own_tok", "reported_s", "seq", "tok")

    def __init__(self) -> None:
        self.reported_s = -np.inf
        self.seq, self.tok = 0, 0
        self.own_seq, self.own_tok = 0, 0  # given by this dispatcher, and not taken back
        self.changes = deque[Change]()


class WorkerAccounts:
    """All workers of one role, a group's side by side.

    `tok` and `seq` are float64[workers], of a dead worker infinite and 0. `slices` has a group's
    place in them, `places` its place in `groups`, `node_index` int64[workers] the node of each.
    """

    def __init__(self, topology: Topology, role: Role) -> None:
        node_index = {node.name: index for index, node in enumerate(topology.nodes)}
        self.groups = topology.groups(role)
        self.places = {group: place for place, group in enumerate(self.groups)}
        placed = [(n, w) for n, w in topology.placed_workers() if w.role == role]
        placed.sort(key=lambda pair: self.places[pair[1].group])
        self.workers: Sequence[ClusterWorker] = [worker for _, worker in placed]
        self.index = {worker.name: place for place, worker in enumerate(self.workers)}
        self.node_index = np.array([node_index[node.name] for node, _ in placed], np.int64)
        self.tok = np.zeros(len(placed))
        self.seq = np.zeros(len(placed))
        self.is_alive = np.ones(len(placed), np.bool_)
        self.all_alive = True
        self.capacity = np.array([w.kv_capacity_tokens for w in self.workers], np.float64)
        self.slices = dict[str, slice]()
        for place, worker in enumerate(self.workers):
            begin = self.slices.get(worker.group, slice(place, place)).start
            self.slices[worker.group] = slice(begin, place + 1)
        self._accounts = [_Account() for _ in placed]
        self._places = {
            (node.name, worker.name, worker.group): place
            for place, (node, worker) in enumerate(placed)
        }

    def take_over(self, former: WorkerAccounts) -> None:
        """What is known of workers that the topology before this one had at the same place."""
        for key in self._places.keys() & former._places.keys():
            place, before = self._places[key], former._places[key]
            self._accounts[place] = former._accounts[before]
            self.is_alive[place] = former.is_alive[before]
            self.tok[place], self.seq[place] = former.tok[before], former.seq[before]
        self.all_alive = bool(self.is_alive.all())

    def give(self, worker: int, tokens: int, now_s: float) -> None:
        """A request of so many tokens."""
        self._change(worker, now_s, 1, tokens)

    def take_back(self, worker: int, tokens: int, now_s: float) -> None:
        """A request that was given, which is finished or given up."""
        self._change(worker, now_s, -1, -tokens)

    def report(self, load: WorkerLoad, now_s: float) -> None:
        """Keeps what changed after it; ignores one that is older than the last, or too old."""
        place = self.index[load.worker]
        account = self._accounts[place]
        if load.reported_s < max(account.reported_s, now_s - REPORT_AGE_S_MAX):
            return
        account.reported_s = load.reported_s
        changes = account.changes
        while changes and changes[0][0] <= load.reported_s:
            changes.popleft()
        account.seq = load.seq + sum(seq for _, seq, _ in changes)
        account.tok = load.tok + sum(tok for _, _, tok in changes)
        self._show(place)

    def bury(self, worker: int) -> None:
        """It is dead and gets nothing; what was given to it must have been taken back."""
        self._accounts[worker] = _Account()
        self.is_alive[worker] = self.all_alive = False
        self.tok[worker], self.seq[worker] = np.inf, 0.0

    def revive(self, worker: int) -> None:
        """It runs again, and has nothing."""
        self.is_alive[worker] = True
        self.all_alive = bool(self.is_alive.all())
        self._show(worker)

    def _change(self, worker: int, now_s: float, seq: int, tok: int) -> None:
        account = self._accounts[worker]
        account.own_seq += seq
        account.own_tok += tok
        account.seq += seq
        account.tok += tok
        changes = account.changes
        changes.append((now_s, seq, tok))
        too_old_s = now_s - REPORT_AGE_S_MAX
        while changes[0][0] < too_old_s:
            changes.popleft()
        self._show(worker)

    def _show(self, worker: int) -> None:
        if self.all_alive or self.is_alive[worker]:
            account = self._accounts[worker]
            own_seq, own_tok = account.own_seq, account.own_tok
            self.seq[worker] = own_seq if own_seq > account.seq else account.seq
            self.tok[worker] = own_tok if own_tok > account.tok else account.tok
