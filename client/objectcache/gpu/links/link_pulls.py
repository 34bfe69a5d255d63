"""Which micro-task each link takes next. Pure; time is an argument, and nothing is copied here.

MMA (section 3.4): micro-tasks wait in a queue for each device, and a link that has fewer than
`depth` on it takes one: of its own device before any other's, else of the longest queue, which it
relays. So a link that is slow or used by others takes less, without anybody asking how it is. The
paper's links take whatever there is, so that at the end all wait for the slowest. By finish time
(`PullSettings.by_finish_time`) a link leaves alone what others finish before it would.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from objectcache.gpu.device import DeviceFailed
from objectcache.gpu.links.earliest_finish import FreeLink, finished_before
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.micro_tasks import DeviceLink, DeviceTransfer, MicroTask, Pull
from objectcache.gpu.links.pull_settings import PullSettings
from objectcache.gpu.pieces import Pieces
from objectcache_schemas.errors import InvalidRequest

_CONTENDED = 1.5  # times what a micro-task was expected to take

_Order = tuple[int, int]  # number of the micro-task, and of those of one number the first


class LinkPulls:
    """One direction of all links. For one thread at a time.

    Whoever carries asks every link after each `begin`, `done` and `lose`, and when
    `ask_again_s` says, until none takes anything.
    """

    def __init__(
        self, links: Sequence[DeviceLink], settings: PullSettings, rates: LinkRates
    ) -> None:
        """Raises `InvalidRequest` for two links of one number."""
        self.settings = settings
        self.rates = rates
        self._links = {link.number: _LinkState(link) for link in links}
        if len(self._links) < len(links):
            raise InvalidRequest("links must have numbers of their own")
        self._queues: dict[tuple[int, frozenset[int]], _Queue] = {}
        self._on_way_bytes: dict[int, int] = {}  # to each device, on links
        self._added = 0

    def begin(
        self,
        device: int,
        pieces: Pieces,
        *,
        due: int = 0,
        node: int = 0,
        links: Iterable[int] | None = None,
        is_behind: bool = False,
    ) -> DeviceTransfer:
        """Queue pieces for a device, over those of the links that reach it: in micro-tasks, or as
        one copy over the device's own link where they are few bytes. What `is_behind` something
        that an engine does may wait for that on its links: no rate is learned from how long.

        Raises `InvalidRequest` where no link reaches the device, and `DeviceFailed` where all that
        did have failed.
        """
        can = self._links.keys() if links is None else links
        reach = [n for n in can if n in self._links and self._links[n].reaches(device)]
        transfer = DeviceTransfer(device, due, frozenset(reach), node)
        transfer.free_s = math.inf if is_behind else -math.inf
        if not transfer.links:
            raise InvalidRequest(f"no link reaches device {device}")
        if not self._alive(transfer.links):
            failed = ", ".join(map(str, sorted(transfer.links)))
            raise DeviceFailed(
                f"no link to device {device} is left, all have failed (of devices {failed}): start "
                "the process again; where they fail again, set 'gpu_copies' to 'off'"
            )
        pieces = pieces.joined()
        if self._direct(transfer) and self._is_small(device, pieces.total_bytes):
            self._put(transfer, pieces, max(1, pieces.total_bytes), self._direct(transfer))
        else:
            self._put_cut(transfer, pieces)
        return transfer

    def _is_small(self, device: int, size_bytes: int) -> bool:
        if self.settings.by_finish_time:  # of several copies each is small, but not all of them
            size_bytes += self._on_way_bytes.get(device, 0) + sum(
                queue.size_bytes for queue in self._queues.values() if queue.device == device
            )
        return size_bytes < self.settings.fallback_bytes

    def pull(self, number: int, now_s: float) -> Pull | None:
        """What the link takes now, if anything; it is on the link until `done` or `lose`."""
        state = self._links[number]
        if (
            state.is_lost
            or len(state.outstanding) >= self.settings.depth
            or now_s < state.resume_s
            or (found := self._queue_for(state, now_s)) is None
        ):
            return None
        queue, due = found
        task = queue.pop(due)
        if not queue:
            del self._queues[queue.key]
        transfer = task.transfer
        transfer.in_flight += 1
        self._on_way_bytes[transfer.device] = (
            self._on_way_bytes.get(transfer.device, 0) + task.size_bytes
        )
        relay_buffer = None
        if not state.is_direct(transfer.device):
            relay_buffer = state.relays % self.settings.relay_buffers
            state.relays += 1
        state.outstanding[task] = now_s
        return Pull(task, relay_buffer)

    def done(self, number: int, task: MicroTask, now_s: float) -> None:
        """The link has carried it."""
        state = self._links[number]
        begun_s = max(state.outstanding[task], state.busy_from_s)
        took_s = now_s - begun_s
        self._off(state, task)
        transfer = task.transfer
        transfer.left -= 1
        state.busy_from_s = now_s
        waited = begun_s < transfer.free_s
        transfer.free_s = min(transfer.free_s, now_s)
        if waited:  # for the engine, nobody knows how long
            return
        node = transfer.node
        expected_s = task.size_bytes / self.rates.bytes_per_s(number, node, now_s)
        was_contended = self.settings.is_background and took_s > _CONTENDED * expected_s
        if was_contended:
            state.resume_s = now_s + expected_s
        self.rates.learn(number, node, task.size_bytes, took_s, now_s, was_contended=was_contended)

    def abort(self, transfer: DeviceTransfer) -> None:
        """Nothing more of it is taken. Its memory is still in use until `transfer.is_quiet`."""
        transfer.is_aborted = True
        for queue in list(self._queues.values()):
            transfer.left -= queue.drop(transfer)
            if not queue:
                del self._queues[queue.key]

    def lose(self, number: int) -> list[DeviceTransfer]:
        """The link has failed, and copies nothing any more: what was on it is queued again, in its
        place. Returns the transfers that no other link can carry; they are aborted.
        """
        state = self._links[number]
        state.is_lost = True
        tasks = list(state.outstanding)
        for task in tasks:
            self._off(state, task)
        for queue in [queue for queue in self._queues.values() if number in queue.links]:
            del self._queues[queue.key]
            tasks += queue.tasks()
        lost: list[DeviceTransfer] = []
        for task in tasks:
            transfer = task.transfer
            transfer.left -= 1
            if transfer.is_aborted:
                continue
            if self._alive(transfer.links):
                # What was too long for a relay's buffers is cut now.
                self._put_cut(transfer, task.pieces, task.number)
            else:
                transfer.is_aborted = True
                lost.append(transfer)
        return lost

    def ask_again_s(self, now_s: float) -> float | None:
        """When a link may take something that takes nothing now, though nothing is done until then:
        one that pauses, or leaves something to others who may turn out to be late.
        """
        wanted = frozenset[int]().union(*(queue.links for queue in self._queues.values()))
        idle = [
            state
            for number in wanted
            if len((state := self._links[number]).outstanding) < self.settings.depth
        ]
        return min((self._again_s(state, now_s) for state in idle), default=None)

    def _again_s(self, state: _LinkState, now_s: float) -> float:
        if state.resume_s > now_s:
            return state.resume_s
        return now_s + self.settings.chunk_bytes / self.rates.bytes_per_s(
            state.link.number, 0, now_s
        )

    # --- queues ---

    def _put_cut(self, transfer: DeviceTransfer, pieces: Pieces, number: int | None = None) -> None:
        chunk_bytes = self.settings.chunk_bytes
        if self.settings.by_finish_time:  # alike, so that it is known how long each takes
            count = -(-pieces.total_bytes // chunk_bytes) or 1
            chunk_bytes = -(-pieces.total_bytes // count) or 1
        self._put(transfer, pieces, chunk_bytes, self._alive(transfer.links), number)

    def _put(
        self,
        transfer: DeviceTransfer,
        pieces: Pieces,
        chunk_bytes: int,
        links: frozenset[int],
        number: int | None = None,
    ) -> None:
        key = transfer.device, links
        for part in pieces.micro_tasks(chunk_bytes, self.settings.pieces_max):
            self._added += 1
            at = self._added if number is None else number
            task = MicroTask(transfer, part, at, part.total_bytes)
            queue = self._queues.setdefault(key, _Queue(*key))
            queue.push(self._due(transfer), (at, self._added), task)
            transfer.left += 1

    def _due(self, transfer: DeviceTransfer) -> int:
        return transfer.due if self.settings.by_finish_time else 0

    def _direct(self, transfer: DeviceTransfer) -> frozenset[int]:
        alive = self._alive(transfer.links)
        return frozenset(n for n in alive if self._links[n].is_direct(transfer.device))

    def _off(self, state: _LinkState, task: MicroTask) -> None:
        del state.outstanding[task]
        task.transfer.in_flight -= 1
        self._on_way_bytes[task.transfer.device] -= task.size_bytes

    def _alive(self, links: frozenset[int]) -> frozenset[int]:
        return frozenset(number for number in links if not self._links[number].is_lost)

    # --- the choice ---

    def _queue_for(self, state: _LinkState, now_s: float) -> tuple[_Queue, int] | None:
        """A queue to take from, and of which layer."""
        reachable = [queue for queue in self._queues.values() if state.link.number in queue.links]
        own = [queue for queue in reachable if state.is_direct(queue.device)]
        if self.settings.direct_first and own:
            first = _Queue.urgency if self.settings.by_finish_time else _Queue.order
            reachable = sorted(own, key=first)
        else:
            reachable.sort(key=_Queue.shortness)
        for queue in reachable:
            if (due := self._due_for(state, queue, now_s)) is not None:
                return queue, due
        return None

    def _due_for(self, state: _LinkState, queue: _Queue, now_s: float) -> int | None:
        """The first layer of which the link should carry some, though others could. A slow link
        helps a later layer than a quick one.
        """
        if not self.settings.by_finish_time:
            return queue.due_behind(0)
        task_bytes = queue.size_bytes / len(queue)
        node = queue.first.transfer.node
        others = [
            self._free_link(other, task_bytes, node, now_s)
            for number in queue.links
            if (other := self._links[number]) is not state and self._helps(other, queue.device)
        ]
        mine = self._free_link(state, task_bytes, node, now_s)
        return queue.due_behind(finished_before(mine, others))

    def _helps(self, state: _LinkState, device: int) -> bool:
        """Whether a link takes from a device's queue: its own, or while its own are empty."""
        return state.is_direct(device) or not any(
            state.is_direct(queue.device) and state.link.number in queue.links
            for queue in self._queues.values()
        )

    def _free_link(self, state: _LinkState, task_bytes: float, node: int, now_s: float) -> FreeLink:
        number = state.link.number
        busy_s = sum(
            task.size_bytes / self.rates.bytes_per_s(number, task.transfer.node, now_s)
            for task in state.outstanding
        )
        if state.outstanding:
            first, taken_s = next(iter(state.outstanding.items()))
            begun_s = max(state.busy_from_s, taken_s, first.transfer.free_s)
            late_s = now_s - min(begun_s, now_s) - busy_s
            busy_s = abs(late_s)  # what is late is taken to be as late again
        busy_s = max(busy_s, state.resume_s - now_s)
        return FreeLink(number, busy_s, task_bytes / self.rates.bytes_per_s(number, node, now_s))

    def __repr__(self) -> str:
        queued = sum(len(queue) for queue in self._queues.values())
        on_links = sum(len(state.outstanding) for state in self._links.values())
        return f"<LinkPulls {len(self._links)} links, {queued} queued, {on_links} on links>"


class _LinkState:
    __slots__ = ("busy_from_s", "is_lost", "link", "outstanding", "relays", "resume_s")

    def __init__(self, link: DeviceLink) -> None:
        self.link = link
        self.outstanding: dict[MicroTask, float] = {}  # when each was taken, oldest first
        self.busy_from_s = float("-inf")  # when the last one was done
        self.resume_s = float("-inf")  # it takes nothing before
        self.relays = 0
        self.is_lost = False

    def is_direct(self, device: int) -> bool:
        return device in self.link.direct

    def reaches(self, device: int) -> bool:
        return device in self.link.direct or device in self.link.relayed


class _Queue:
    """Micro-tasks for one device that the same links can carry, the most urgent first."""

    __slots__ = ("_heaps", "device", "links", "size_bytes")

    def __init__(self, device: int, links: frozenset[int]) -> None:
        self.device = device
        self.links = links
        self.size_bytes = 0
        self._heaps: dict[int, list[tuple[_Order, MicroTask]]] = {}  # by due, which are in order

    @property
    def key(self) -> tuple[int, frozenset[int]]:
        return self.device, self.links

    @property
    def first(self) -> MicroTask:
        return next(iter(self._heaps.values()))[0][1]

    def push(self, due: int, order: _Order, task: MicroTask) -> None:
        if due not in self._heaps:
            self._heaps[due] = []
            self._heaps = dict(sorted(self._heaps.items(), key=lambda entry: entry[0]))
        heapq.heappush(self._heaps[due], (order, task))
        self.size_bytes += task.size_bytes

    def due_behind(self, count: int) -> int | None:
        """When the first one is due that has so many before it; None if there are no more."""
        for due, heap in self._heaps.items():
            count -= len(heap)
            if count < 0:
                return due
        return None

    def pop(self, due: int) -> MicroTask:
        _, task = heapq.heappop(self._heaps[due])
        if not self._heaps[due]:
            del self._heaps[due]
        self.size_bytes -= task.size_bytes
        return task

    def drop(self, transfer: DeviceTransfer) -> int:
        """Forget a transfer's; how many they were."""
        before = len(self)
        for due, heap in list(self._heaps.items()):
            kept = [entry for entry in heap if entry[1].transfer is not transfer]
            heapq.heapify(kept)
            self._heaps[due] = kept
            if not kept:
                del self._heaps[due]
        self.size_bytes = sum(task.size_bytes for task in self.tasks())
        return before - len(self)

    def tasks(self) -> list[MicroTask]:
        return [task for heap in self._heaps.values() for _, task in heap]

    def urgency(self) -> tuple[int, int, _Order]:
        """The layer that is due first sorts first, and of it what the fewest links can carry: a NIC
        has nothing to do once others have taken what it has, too.
        """
        due, order = self.order()
        return due, len(self.links), order

    def order(self) -> tuple[int, _Order]:
        due, heap = next(iter(self._heaps.items()))
        return due, heap[0][0]

    def shortness(self) -> tuple[int, tuple[int, _Order]]:
        """The longest sorts first."""
        return -self.size_bytes, self.order()

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))
