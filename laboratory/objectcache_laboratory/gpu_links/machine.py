"""The machine of MMA (section 5: eight H20, four to a NUMA node, PCIe 5, NVSwitch) in virtual time.

A micro-task of its own device passes one PCIe link; a relayed one that of the relay, and NVLink
when it is in the relay's buffer as a whole. What is in one node's memory and goes over links of the
other shares what is between the nodes. Each copy takes `task_s` beside its bytes, and a micro-task
is known to be done `sync_s` late. A storage NIC writes what the store has into the memory of any
GPU, past host memory and what is between the nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from objectcache.gpu.links.link_pulls import LinkPulls
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.micro_tasks import DeviceLink, DeviceTransfer, Pull
from objectcache.gpu.links.pull_settings import PullSettings
from objectcache.gpu.pieces import Pieces
from objectcache_laboratory.cluster.events import VirtualTime

GB = 1e9
_LEFT_BYTES = 0.5  # a flow with less than that has arrived


@dataclass(frozen=True, slots=True)
class LinkedGpus:
    """One link a GPU. `between_nodes` is fitted: of the paper's 245 GB/s what four links leave."""

    gpus: int = 8
    gpus_of_node: int = 4
    link_bytes_per_s: float = 53 * GB  # figure 8, native
    between_nodes_bytes_per_s: float = 33 * GB
    peer_bytes_per_s: float = 368 * GB  # table 2: of NVLink, into or out of one GPU
    fixed_s: float = 60e-6  # before the first micro-task of a transfer that is cut
    task_s: float = 6e-6
    sync_s: float = 25e-6
    left_by_others: tuple[tuple[int, float], ...] = ()  # of links, as (link, share)
    nics_bytes_per_s: tuple[float, ...] = ()  # of each storage NIC; their links come behind GPUs'

    @property
    def links(self) -> list[DeviceLink]:
        """A GPU's is direct for itself and a relay for all others, a NIC's direct for all."""
        gpus = frozenset(range(self.gpus))
        return [
            *(DeviceLink(gpu, frozenset({gpu}), gpus - {gpu}) for gpu in range(self.gpus)),
            *(DeviceLink(nic, gpus) for nic in self.nics),
        ]

    @property
    def nics(self) -> range:
        """The numbers of storage NICs' links."""
        return range(self.gpus, self.gpus + len(self.nics_bytes_per_s))

    def node_links(self, node: int) -> tuple[int, ...]:
        """The links of a node's GPUs."""
        return tuple(gpu for gpu in range(self.gpus) if gpu // self.gpus_of_node == node)

    def native_s(self, size_bytes: int) -> float:
        """One copy over GPU 0's own link."""
        return size_bytes / self.own_bytes_per_s(0)

    def own_bytes_per_s(self, link: int) -> float:
        """What others leave of a link."""
        whole = self.link_bytes_per_s
        if link in self.nics:
            whole = self.nics_bytes_per_s[link - self.gpus]
        return whole * dict(self.left_by_others).get(link, 1.0)


@dataclass(frozen=True, slots=True)
class Copying:
    """What is asked for: so many bytes to a GPU, from memory of a node."""

    size_bytes: int
    gpu: int = 0
    node: int = 0
    due: int = 0
    at_s: float = 0.0  # when it is asked for
    links: tuple[int, ...] | None = None  # that may carry it; None is all


@dataclass(frozen=True, slots=True)
class Carried:
    """How a run went."""

    ended_s: tuple[float, ...]  # of each copying
    relayed_bytes: int
    total_bytes: int

    @property
    def last_s(self) -> float:
        """When everything was there."""
        return max(self.ended_s)

    @property
    def bytes_per_s(self) -> float:
        """All bytes over the whole time."""
        return self.total_bytes / self.last_s

    @property
    def relayed_share(self) -> float:
        """Of all bytes."""
        return self.relayed_bytes / self.total_bytes


def carry(
    machine: LinkedGpus,
    settings: PullSettings,
    copyings: Sequence[Copying],
    rates: LinkRates | None = None,
    *,
    seed: int | None = None,
    at_once: int | None = None,
) -> Carried:
    """Copy all, so many `at_once`. `rates` learns, and starts out with a link's own.

    Links that could take something take it in the order of their numbers, near ones first; with a
    seed, in any.
    """
    if rates is None:
        rates = LinkRates(machine.link_bytes_per_s)
    return _Run(machine, settings, rates, seed).all(copyings, at_once or len(copyings))


class _Run:
    def __init__(
        self, machine: LinkedGpus, settings: PullSettings, rates: LinkRates, seed: int | None
    ) -> None:
        self.machine = machine
        self.settings = settings
        self.time = VirtualTime()
        self.flows = _Flows(self.time)
        self.pulls = LinkPulls(machine.links, settings, rates)
        self.engines = [_Engine(self, link.number) for link in machine.links]
        self.relayed_bytes = 0
        self._to_come: deque[tuple[int, Copying, Pieces]] = deque()
        self._again_s = 0.0
        self._asked = list(self.engines)
        self._random = None if seed is None else np.random.default_rng(seed)

    def all(self, copyings: Sequence[Copying], at_once: int) -> Carried:
        size_bytes = sum(copying.size_bytes for copying in copyings)
        self.is_cut = size_bytes >= self.settings.fallback_bytes
        self.waiting: dict[DeviceTransfer, int] = {}
        self.ended_s = [0.0] * len(copyings)
        base = 0
        for index, copying in enumerate(copyings):
            pieces = Pieces.of([(base, base, copying.size_bytes)])
            base += copying.size_bytes + 1
            self._to_come.append((index, copying, pieces))
        for _ in range(at_once):
            self._begin_next()
        self.time.run()
        assert not self.waiting
        return Carried(tuple(self.ended_s), self.relayed_bytes, size_bytes)

    def _begin_next(self) -> None:
        if self._to_come:
            index, copying, pieces = self._to_come.popleft()
            at_s = max(copying.at_s, self.time.now_s)
            fixed_s = self.machine.fixed_s if self.is_cut else 0.0
            self.time.at(at_s + fixed_s, partial(self._begin, index, copying, pieces))

    def _begin(self, index: int, copying: Copying, pieces: Pieces) -> None:
        transfer = self.pulls.begin(
            copying.gpu, pieces, due=copying.due, node=copying.node, links=copying.links
        )
        self.waiting[transfer] = index
        self.time.at(self.time.now_s, self.ask)  # when all that begins now has begun

    def ask(self) -> None:
        """Every link in turn, until none takes anything."""
        now_s = self.time.now_s
        if self._random is not None:
            order = self._random.permutation(len(self.engines))
            self._asked = [self.engines[index] for index in order]
        took = True
        while took:
            took = False
            for engine in self._asked:
                if (pull := self.pulls.pull(engine.link, now_s)) is not None:
                    engine.put(pull)
                    took = True
        again_s = self.pulls.ask_again_s(now_s)
        if again_s is not None and self._again_s <= now_s:  # it will not be asked before anyway
            self._again_s = again_s
            self.time.at(again_s, self.ask)

    def done(self, link: int, pull: Pull) -> None:
        transfer = pull.task.transfer
        if pull.is_relayed:
            self.relayed_bytes += pull.task.size_bytes
        self.pulls.done(link, pull.task, self.time.now_s)
        if transfer.is_done:
            self.ended_s[self.waiting.pop(transfer)] = self.time.now_s
            self._begin_next()
        self.ask()


class _Engine:
    """What takes what is on a link in order: a GPU's copy engine, with its relay buffers, or a
    NIC.
    """

    def __init__(self, run: _Run, link: int) -> None:
        self.link = link
        self._run = run
        self._queue: deque[Pull] = deque()
        self._is_busy = False
        self._full_buffers: set[int] = set()
        machine = run.machine
        self._own = {f"link {link}": machine.own_bytes_per_s(link)}
        self._far = self._own | {"between nodes": machine.between_nodes_bytes_per_s}
        if link in machine.nics:  # the store is as near to either node
            self._far = self._own
        self._node = link // machine.gpus_of_node

    def put(self, pull: Pull) -> None:
        self._queue.append(pull)
        self._next()

    def _next(self) -> None:
        if self._is_busy or not self._queue:
            return
        pull = self._queue[0]
        if pull.relay_buffer is not None:
            if pull.relay_buffer in self._full_buffers:
                return
            self._full_buffers.add(pull.relay_buffer)
        self._queue.popleft()
        self._is_busy = True
        passes = self._own if pull.task.transfer.node == self._node else self._far
        self._copy(pull, passes, lambda: self._over_link(pull))

    def _over_link(self, pull: Pull) -> None:
        self._is_busy = False
        if pull.relay_buffer is None:
            self._told(pull)
        else:
            places = f"out of {self.link}", f"into {pull.task.transfer.device}"
            passes = dict.fromkeys(places, self._run.machine.peer_bytes_per_s)
            self._copy(pull, passes, lambda: self._relayed(pull))
        self._next()

    def _relayed(self, pull: Pull) -> None:
        assert pull.relay_buffer is not None
        self._full_buffers.remove(pull.relay_buffer)
        self._told(pull)
        self._next()

    def _copy(self, pull: Pull, passes: Mapping[str, float], then: Callable[[], None]) -> None:
        run, size = self._run, pull.task.size_bytes
        begin_s = run.time.now_s + (run.machine.task_s if run.is_cut else 0.0)
        run.time.at(begin_s, lambda: run.flows.add(size, passes, then))

    def _told(self, pull: Pull) -> None:
        run = self._run
        told_s = run.time.now_s + (run.machine.sync_s if run.is_cut else 0.0)
        run.time.at(told_s, lambda: run.done(self.link, pull))


@dataclass(slots=True, eq=False)
class _Flow:
    left_bytes: float
    passes: Mapping[str, float]
    arrive: Callable[[], None]
    rate: float = 0.0


class _Flows:
    """Bytes on their way: of whatever several pass, each has an equal share."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._flows: list[_Flow] = []
        self._since_s = 0.0
        self._number = 0  # of the last change

    def add(self, size_bytes: int, passes: Mapping[str, float], arrive: Callable[[], None]) -> None:
        self._go_on()
        self._flows.append(_Flow(size_bytes, passes, arrive))
        self._changed()

    def _go_on(self) -> None:
        passed_s = self._time.now_s - self._since_s
        self._since_s = self._time.now_s
        for flow in self._flows:
            flow.left_bytes -= flow.rate * passed_s

    def _changed(self) -> None:
        counts: dict[str, int] = {}
        for flow in self._flows:
            for place in flow.passes:
                counts[place] = counts.get(place, 0) + 1
        for flow in self._flows:
            flow.rate = min(rate / counts[place] for place, rate in flow.passes.items())
        self._number += 1
        if self._flows:
            next_s = min(flow.left_bytes / flow.rate for flow in self._flows)
            number = self._number
            self._time.at(self._time.now_s + next_s, lambda: self._arrived(number))

    def _arrived(self, number: int) -> None:
        if number != self._number:
            return  # something has changed since
        self._go_on()
        there = [flow for flow in self._flows if flow.left_bytes < _LEFT_BYTES]
        self._flows = [flow for flow in self._flows if flow.left_bytes >= _LEFT_BYTES]
        self._changed()
        for flow in there:
            flow.arrive()
