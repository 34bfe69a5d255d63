"""Storage NICs, which read deliveries in some order, and links that only add up.

A storage NIC is where deliveries queue, so it has an order. First come, a delivery is read whole
and nothing about it changes once it has begun. In due-time order, layers of several deliveries take
turns: `DueTimeNic`. Compute NICs and memory carry a fraction of what they could, so they are a time
until which they are busy (`BusyLink`); where they are the bottleneck, that time grows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np

from objectcache_laboratory.cluster.events import VirtualTime

ReadOrder = Literal["first_come", "due_time"]
AHEAD_LAYERS = 1.0  # a layer is wanted from so many compute windows before it is due


class BusyLink:
    """One direction of a compute NIC, or a node's memory."""

    __slots__ = ("busy_until_s", "carried_bytes", "rate_bytes_per_s")

    def __init__(self, rate_bytes_per_s: float) -> None:
        self.rate_bytes_per_s = rate_bytes_per_s
        self.busy_until_s = self.carried_bytes = 0.0

    def carry(self, now_s: float, carried_bytes: float) -> float:
        """When the last of these bytes is over the link."""
        self.carried_bytes += carried_bytes
        self.busy_until_s = max(self.busy_until_s, now_s) + carried_bytes / self.rate_bytes_per_s
        return self.busy_until_s


class NicTraffic:
    """Bytes of each window of time, for the balance between NICs."""

    __slots__ = ("_window_s", "bytes_of")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self.bytes_of: list[float] = []

    def add(self, begin_s: float, end_s: float, rate_bytes_per_s: float) -> None:
        """The NIC was busy from begin to end."""
        window_s, windows = self._window_s, self.bytes_of
        first, last = int(begin_s / window_s), int(end_s / window_s)
        windows.extend([0.0] * (last + 1 - len(windows)))
        for window in range(first, last + 1):
            begun_s, ended_s = window * window_s, (window + 1) * window_s
            busy_s = min(end_s, ended_s) - max(begin_s, begun_s)
            windows[window] += busy_s * rate_bytes_per_s


class NicRead:
    """What one NIC reads of one delivery. `hop_s` is a layer's way from a relay.

    `on_usable` is called as soon as the prefill may begin without waiting for a layer, `on_done`
    when the last layer is there; both in events of their own.
    """

    __slots__ = (
        "compute_s",
        "due_s",
        "hop_s",
        "is_over",
        "is_usable",
        "layer_bytes",
        "layers_read",
        "num_layers",
        "on_done",
        "on_usable",
        "origin_s",
    )

    def __init__(
        self,
        layer_bytes: float,
        num_layers: int,
        compute_s: float,
        hop_s: float,
        on_usable: Callable[[], None] | None,
        on_done: Callable[[], None],
    ) -> None:
        self.layer_bytes, self.num_layers = layer_bytes, num_layers
        self.compute_s, self.hop_s = compute_s, hop_s
        self.on_usable, self.on_done = on_usable, on_done
        self.is_usable = on_usable is None
        self.is_over = False  # its last layer is there
        self.layers_read = 0
        self.origin_s = 0.0  # when the GPU could have begun layer 0, by what has arrived
        self.due_s = 0.0  # of the next layer

    def finish(self) -> None:
        """The last layer is with the GPU."""
        self.is_over = True
        self.on_done()

    @property
    def window_s(self) -> float:
        """Of one layer's compute."""
        return self.compute_s / self.num_layers


class StorageNic(ABC):
    """Reads for its node, and for others by relay, at its rate while there is something."""

    def __init__(self, time: VirtualTime, rate_bytes_per_s: float, traffic: NicTraffic) -> None:
        self._time, self._rate, self._traffic = time, rate_bytes_per_s, traffic
        self.queue_bytes = self.read_bytes = 0.0
        self._is_busy = False

    def read(self, read: NicRead) -> None:
        """Queue it."""
        self.queue_bytes += read.layer_bytes * read.num_layers
        read.origin_s = self._time.now_s
        self._enqueue(read)
        if not self._is_busy:
            self._begin()

    @abstractmethod
    def _enqueue(self, read: NicRead) -> None: ...

    @abstractmethod
    def _begin(self) -> None:
        """Start on what is next, or go idle."""

    def _carry(self, carried_bytes: float) -> float:
        """Busy with these from now on; when they are over."""
        begin_s, end_s = self._time.now_s, self._time.now_s + carried_bytes / self._rate
        self._traffic.add(begin_s, end_s, self._rate)
        self.queue_bytes -= carried_bytes
        self.read_bytes += carried_bytes
        return end_s


class FirstComeNic(StorageNic):
    """Deliveries one after the other."""

    def __init__(self, time: VirtualTime, rate_bytes_per_s: float, traffic: NicTraffic) -> None:
        super().__init__(time, rate_bytes_per_s, traffic)
        self._queue = deque[NicRead]()

    def _enqueue(self, read: NicRead) -> None:
        self._queue.append(read)

    def _begin(self) -> None:
        self._is_busy = bool(self._queue)
        if not self._queue:
            return
        read = self._queue.popleft()
        begin_s = self._time.now_s
        end_s = self._carry(read.layer_bytes * read.num_layers)
        layer_s = (end_s - begin_s) / read.num_layers
        read.origin_s = max(begin_s + layer_s, end_s - (read.compute_s - read.window_s))
        if read.on_usable is not None:
            self._time.at(read.origin_s + read.hop_s, read.on_usable)
        self._time.at(end_s, lambda: self._end(read))

    def _end(self, read: NicRead) -> None:
        now_s = self._time.now_s
        self._time.at(now_s + read.hop_s, read.finish)
        self._begin()


class DueTimeNic(StorageNic):
    """Layers by need, so that GPUs together wait least.

    A GPU that could have begun layer 0 at `origin` needs layer l at origin + l x window, and a
    layer that comes later moves its origin. Of the deliveries whose next layer is wanted, because
    it is due within `AHEAD_LAYERS` windows, the one with the least bytes left x rate needed is
    read: it is soon through, or leaves the NIC to others. Where none is wanted, the earliest due.
    That is the order in which `stall_dynamic` of the storage server places origins, decided
    again for every layer instead of planned ahead and searched.
    """

    def __init__(self, time: VirtualTime, rate_bytes_per_s: float, traffic: NicTraffic) -> None:
        super().__init__(time, rate_bytes_per_s, traffic)
        self._reads: list[NicRead] = []

    def _enqueue(self, read: NicRead) -> None:
        read.due_s = self._time.now_s
        self._reads.append(read)

    def _begin(self) -> None:
        self._is_busy = bool(self._reads)
        if not self._reads:
            return
        read = self._next()
        end_s = self._carry(read.layer_bytes)
        self._time.at(end_s, lambda: self._end(read))

    def _next(self) -> NicRead:
        now_s = self._time.now_s
        wanted = [
            read
            for read in self._reads
            if read.due_s <= now_s + AHEAD_LAYERS * read.window_s + read.layer_bytes / self._rate
        ]
        if wanted:
            return min(wanted, key=self._urgency)
        return min(self._reads, key=lambda read: read.due_s)

    def _urgency(self, read: NicRead) -> float:
        left_bytes = (read.num_layers - read.layers_read) * read.layer_bytes
        needed = read.layer_bytes / read.window_s if read.window_s else np.inf
        return left_bytes * min(needed, self._rate)

    def _end(self, read: NicRead) -> None:
        now_s = self._time.now_s
        read.origin_s = max(read.origin_s, now_s - read.layers_read * read.window_s)
        read.layers_read += 1
        read.due_s = read.origin_s + read.layers_read * read.window_s
        left = read.num_layers - read.layers_read
        if not read.is_usable and left * read.layer_bytes / self._rate <= read.compute_s - (
            read.window_s
        ):
            self._usable(read)
        if not left:
            self._reads.remove(read)
            self._usable(read)
            self._time.at(now_s + read.hop_s, read.finish)
        self._begin()

    def _usable(self, read: NicRead) -> None:
        if not read.is_usable and read.on_usable is not None:
            read.is_usable = True
            self._time.at(self._time.now_s + read.hop_s, read.on_usable)


NICS: dict[ReadOrder, type[StorageNic]] = {"first_come": FirstComeNic, "due_time": DueTimeNic}
