"""A device without hardware: its streams are threads, its link has a rate, its bytes are real."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np

from objectcache.gpu.device import (
    KERNEL_PIECE_BYTES,
    Device,
    DeviceFailed,
    Direction,
    Lane,
    Mark,
    StreamHold,
    Way,
)
from objectcache.gpu.pieces import Pieces
from objectcache.payload import Bytes
from objectcache_schemas.errors import Unavailable

_CLOSING_S = 10.0  # how long a closing stream is waited for


class _Link:
    """Bytes of one direction pass one after the other, at so much a second."""

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        self._rate_bytes_per_s = rate_bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def limit(self, rate_bytes_per_s: float) -> None:
        """So many from now on."""
        self._rate_bytes_per_s = rate_bytes_per_s

    def passes(self, count_bytes: int) -> None:
        if self._rate_bytes_per_s is None:
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(now_s, self._free_s) + count_bytes / self._rate_bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


class _EmulatedMark(Mark):
    def __init__(self) -> None:
        self.reached = threading.Event()

    def wait(self) -> None:
        self.reached.wait()


class _Stream:
    """Does what it is given in its order, in a thread of its own."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="emulated-stream", daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # told as the thread's; who waits behind it does not hang
                told = (type(error), error, error.__traceback__, self._thread)
                threading.excepthook(threading.ExceptHookArgs(told))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_CLOSING_S)


class EmulatedDevice(Device):
    """Memory of this process that plays a device's. `rate_bytes_per_s` is each direction's.

    Devices `beside` each other reach each other, as peers, and the same page-locked memory.
    `breaks` has all that is asked of lanes from now on fail.
    """

    def __init__(
        self,
        rate_bytes_per_s: float | None = None,
        beside: EmulatedDevice | None = None,
        node: int | None = None,
    ) -> None:
        self.node = node
        self.peers: list[Device] = [] if beside is None else beside.peers
        self.peers.append(self)
        self.place = f"emulated {id(self):x}"
        self.kind = "emulated"
        self.breaks = threading.Event()
        self.peer_link = _Link(None)
        self.ways = frozenset(Way)
        self._links = {direction: _Link(rate_bytes_per_s) for direction in Direction}
        self._streams: dict[int, _Stream] = {}
        self._handles = itertools.count(1)
        self._memory: dict[int, Bytes] = {}
        self._page_locked: dict[int, int] = {} if beside is None else beside._page_locked

    def enter_thread(self) -> None:
        pass

    def lock_pages(self, address: int, length_bytes: int) -> None:
        assert address not in self._page_locked
        self._page_locked[address] = length_bytes

    def unlock_pages(self, address: int) -> None:
        del self._page_locked[address]

    def lane(self, task_bytes_max: int, pieces_max: int, beside: Lane | None = None) -> Lane:
        if beside is None:
            handle = next(self._handles)
            self._streams[handle] = _Stream()
        else:
            handle = beside.stream
        return _EmulatedLane(self, handle, task_bytes_max, pieces_max, owns=beside is None)

    def relay(self, target: Device, task_bytes_max: int, pieces_max: int) -> Lane:
        if target not in self.peers:
            raise Unavailable(f"{self!r} cannot reach {target!r}")
        handle = next(self._handles)
        self._streams[handle] = _Stream()
        return _EmulatedRelayLane(self, handle, task_bytes_max, pieces_max, owns=True)

    def mark(self, stream: int) -> Mark:
        mark = _EmulatedMark()
        self._streams[stream].add(mark.reached.set)
        return mark

    def hold(self, stream: int, mark: Mark) -> None:
        self._streams[stream].add(mark.wait)

    def stream_hold(self) -> StreamHold:
        return _EmulatedStreamHold(self)

    def allocate(self, length_bytes: int) -> int:
        memory = np.zeros(length_bytes, np.uint8)
        self._memory[memory.ctypes.data] = memory
        return memory.ctypes.data

    def free(self, address: int) -> None:
        del self._memory[address]

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def read(self, address: int, length_bytes: int) -> bytes:
        return ctypes.string_at(address, length_bytes)

    def stream_of(self, handle: int) -> _Stream:
        """The stream behind a handle."""
        return self._streams[handle]

    @property
    def locked_bytes(self) -> int:
        """How much host memory is page-locked."""
        return sum(self._page_locked.values())

    def closed(self, handle: int) -> None:
        """A lane's stream is gone."""
        self._streams.pop(handle).close()

    def moves(self, direction: Direction, host: int, device: int, count_bytes: int) -> None:
        """Copy over the link, which takes its time."""
        assert self._reaches(host, count_bytes), "host memory that is not page-locked"
        self._links[direction].passes(count_bytes)
        self.places(direction, host, device, count_bytes)

    def places(self, direction: Direction, host: int, device: int, count_bytes: int) -> None:
        """Copy without the link."""
        source, target = (host, device) if direction is Direction.LOAD else (device, host)
        ctypes.memmove(target, source, count_bytes)

    def _reaches(self, host: int, count_bytes: int) -> bool:
        return any(
            begin <= host and host + count_bytes <= begin + length
            for begin, length in list(self._page_locked.items())
        )


class _EmulatedLane(Lane):
    def __init__(
        self, device: EmulatedDevice, handle: int, task_bytes: int, pieces: int, *, owns: bool
    ) -> None:
        self._device = device
        self.stream = handle
        self._stream = device.stream_of(handle)
        self._owns_stream = owns
        self._pieces_max = pieces
        self._done: Mark | None = None
        self._buffer = np.zeros(task_bytes, np.uint8)

    def copy(self, task: Pieces, direction: Direction, way: Way) -> None:
        if self._device.breaks.is_set():
            raise DeviceFailed("the emulated device is broken")
        assert task.total_bytes <= len(self._buffer)
        assert len(task) <= self._pieces_max
        self._stream.add(lambda: self._copy(task, direction, way))
        self._done = self._device.mark(self.stream)

    def _copy(self, task: Pieces, direction: Direction, way: Way) -> None:
        if way is Way.STAGED:
            self._staged(task, direction)
        elif way is Way.ROWS:
            for row in task.rows():
                for index in range(row.count):
                    host = row.host + index * row.host_pitch_bytes
                    device = row.device + index * row.device_pitch_bytes
                    self._device.moves(direction, host, device, row.width_bytes)
        else:
            pieces = task.split(KERNEL_PIECE_BYTES) if way is Way.MAPPED else task
            for host, device, size in pieces.triples():
                self._device.moves(direction, host, device, size)

    def _staged(self, task: Pieces, direction: Direction) -> None:
        buffer = self._buffer.ctypes.data

        def over_link() -> None:
            for host, offset, size in task.host_runs():
                self._device.moves(direction, host, buffer + offset, size)

        def on_device() -> None:
            offset = buffer
            for _, device, size in task.triples():
                self.between(direction, offset, device, size)
                offset += size

        steps = (over_link, on_device) if direction is Direction.LOAD else (on_device, over_link)
        for step in steps:
            step()

    def between(self, direction: Direction, buffer: int, device: int, count_bytes: int) -> None:
        """From the buffer to where the pieces lie, or back."""
        self._device.places(direction, buffer, device, count_bytes)

    def follow(self, mark: Mark) -> None:
        self._stream.add(mark.wait)

    def wait_idle(self) -> None:
        if self._done is not None:
            self._done.wait()
        if self._device.breaks.is_set():
            raise DeviceFailed("the emulated device is broken")

    def close(self) -> None:
        if self._owns_stream:
            self._device.closed(self.stream)


class _EmulatedRelayLane(_EmulatedLane):
    def copy(self, task: Pieces, direction: Direction, way: Way) -> None:
        super().copy(task, direction, Way.STAGED)

    def between(self, direction: Direction, buffer: int, device: int, count_bytes: int) -> None:
        self._device.peer_link.passes(count_bytes)
        super().between(direction, buffer, device, count_bytes)


class _EmulatedStreamHold(StreamHold):
    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device
        self._number = 0
        self._changed = threading.Condition()

    def hold(self, stream: int, number: int) -> None:
        self._device.stream_of(stream).add(lambda: self._wait(number))

    def raise_behind(self, lane: Lane, number: int) -> None:
        self._device.stream_of(lane.stream).add(lambda: self.raise_now(number))

    def raise_now(self, number: int) -> None:
        with self._changed:
            self._number = max(self._number, number)
            self._changed.notify_all()

    def _wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._number >= number)

    def close(self) -> None:
        pass
