"""A delivery's layers on their way into a device, each as soon as it is in host memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from objectcache.deliveries.delivery import Delivery
from objectcache.gpu.device import Device, DeviceFailed, Lane, Mark, StreamHold
from objectcache.gpu.line import Job, Line
from objectcache.gpu.page_locked_memory import PageLockedMemory
from objectcache.gpu.pieces import Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache.payload import Bytes
from objectcache_schemas.errors import (
    DeliveryFailed,
    InvalidRequest,
    ObjectCacheError,
    Unavailable,
)

Places = Callable[[int, Bytes], Pieces]


class _Behind:
    """A moment that copies come behind, and the streams that wait for it already."""

    def __init__(self, mark: Mark) -> None:
        self._mark = mark
        self._streams: set[int] = set()

    def followed_by(self, lane: Lane) -> None:
        """What is queued on the lane from now on comes behind it."""
        if lane.stream not in self._streams:
            lane.follow(self._mark)
            self._streams.add(lane.stream)


class LayerLoad(Job):
    """One delivery's layers. Made by `Copier.load`; ends with `close`, best in a `with` block.

    The device's memory is the load's until it is closed, and the delivery must be open so long.
    """

    def __init__(
        self,
        line: Line,
        device: Device,
        page_locked: PageLockedMemory,
        delivery: Delivery,
        places: Places,
        behind: Mark | None,
        ahead: int | None = None,
    ) -> None:
        """`ahead` is how many layers may be on their way or in use; None: all."""
        self._line = line
        self._device = device
        self._page_locked = page_locked
        self._delivery = delivery
        self._places = places
        self._behind = None if behind is None else _Behind(behind)
        self._layers = delivery.layers
        self._end = self._layers.stop if ahead is None else self._layers.start + ahead
        self._ahead = ahead
        self._next_layer = self._layers.start  # that is cut into micro-tasks
        self._tasks: deque[Pieces] = deque()
        self.files: list[MemoryFile] = []
        self._used: set[int] = set()  # streams, by the layer under way
        self._marks: list[Mark] = []  # one for each layer that is queued as a whole
        self._last_stream = 0  # of the last mark
        self._failure: Exception | None = None
        # Kernels may stand behind a stream that holds for them: none is let hold.
        self._hold: StreamHold | None = (
            None if line.settings.takes_kernels else device.stream_hold()
        )
        self._queued = threading.Condition()
        self._closed = False
        self._ended = threading.Event()  # by `close`, as far as that comes
        delivery.progress.listen(line.wake)

    # --- the engine's thread ---

    def wait(self, layer: int, stream: int, timeout_s: float | None = None) -> None:
        """Have a stream wait until the layer is in its blocks.

        Returns when the layer is on its way to the device, which is when it has arrived in host
        memory: nothing waits for the copies but the stream. Over several links it is when they have
        taken all of it, each its last few micro-tasks: the calling thread waits for those before.
        Raises as `Delivery.wait_layer` does, and `DeviceFailed` where the device has failed, or
        links have not taken all of an arrived layer in time.
        """
        begun_s = time.monotonic()
        self._delivery.wait_begins(layer)
        index = layer - self._layers.start
        if not self._await(lambda: len(self._marks) > index, timeout_s):
            raise DeliveryFailed(f"layer {layer} did not arrive within {timeout_s} s", layer=layer)
        mark = self._marks[index]
        left_s = None if timeout_s is None else max(0.0, begun_s + timeout_s - time.monotonic())
        if not mark.wait_on_way(left_s):
            raise DeviceFailed(f"links have not taken all of layer {layer} within {timeout_s} s")
        self._device.hold(stream, mark)
        self._delivery.wait_ended(layer)

    def hold(self, layer: int, stream: int) -> None:
        """As `wait`, and returns at once, whether or not the layer has arrived: a whole forward
        may be queued ahead. Where the load fails the stream goes on without the layer, and `finish`
        tells.

        Streams share the device's queues: what stands behind a held stream in its queue is held as
        well. So few streams may hold at once, no other load may be asked for behind this one's
        stream, and copies by kernels are refused (`InvalidRequest`).
        """
        if self._closed:
            raise InvalidRequest("the load is closed")
        if self._hold is None:
            ways = self._line.settings.every_way
            names = ", ".join(sorted(way.value for way in ways if way.takes_kernels))
            raise InvalidRequest(
                f"a stream cannot hold for copies by {names}: their kernels may stand behind it"
            )
        self._delivery.progress.check(layer)
        self._hold.hold(stream, layer - self._layers.start + 1)

    def release(self, layer: int, stream: int) -> None:
        """The engine reads nothing of the layers up to this one behind what is queued on the stream
        now: `ahead` more may be where they are. Layers are released in their order.
        """
        behind = _Behind(self._device.mark(stream))
        if self._ahead is not None:
            # In this order: the line's thread looks at the end first.
            self._behind, self._end = behind, layer + 1 + self._ahead
            self._line.wake()

    def finish(self) -> None:
        """Return when all layers are in their blocks. Raises what `wait` raises."""
        self._await(lambda: len(self._marks) == len(self._layers), None)
        for mark in self._marks[-1:]:  # behind all before it
            mark.wait()

    def _await(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        """Sleep until it is so; False when that took too long. Raises where the load has failed."""
        progress = self._delivery.progress
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ends_s = [] if deadline_s is None else [deadline_s - time.monotonic()]
            # Whoever waits for a delivery sees to it that one in which nothing arrives fails.
            if not progress.ended and (silence_s := progress.silence_left_s()) is not None:
                ends_s.append(silence_s)
            with self._queued:
                if not (is_so() or self._failure is not None):
                    self._queued.wait(max(0.0, min(ends_s)) if ends_s else None)
                if is_so():
                    return True
                if (failure := self._failed()) is not None:
                    raise failure
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return False
            progress.fail_if_silent()

    def close(self) -> None:
        """End the load; not from the line's thread.

        Afterwards nothing of it is read or written, and streams that hold for a layer that never
        came go on, as does whoever waits in another thread: `wait` and `finish` raise
        `InvalidRequest`. Whoever repeats it returns when the first one has ended. Raises
        `CopyFailed` where a link has failed with bytes that a stream may wait for, and
        `Unavailable` where the device has, and nobody knows what it still does.
        """
        with self._queued:
            is_first, self._closed = not self._closed, True
            if is_first and not self.over:
                self._failure = InvalidRequest("the load is closed")
            self._queued.notify_all()
        if not is_first:
            self._ended.wait()
            return
        try:
            self._line.remove(self)
            self.files.clear()
        finally:
            self._end_hold()
            self._ended.set()
        for mark in self._marks[-1:]:  # others' failures are no news of this load
            mark.wait()

    def __enter__(self) -> LayerLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failed(self) -> Exception | None:
        failure = self._failure
        if isinstance(failure, DeliveryFailed):
            return DeliveryFailed(failure.message, layer=failure.details.layer)
        if isinstance(failure, ObjectCacheError):
            return type(failure)(failure.message)
        return failure

    # --- the line's thread ---

    @property
    def over(self) -> bool:
        return self._failure is not None or self._next_layer >= self._layers.stop

    def due(self) -> int | None:
        if self.over or self._next_layer >= self._end:
            return None
        ready = bool(self._tasks) or self._delivery.progress.is_ready(self._next_layer)
        return self._next_layer - self._layers.start if ready else None

    def next_task(self, lane: Lane) -> Pieces:
        if not self._tasks:
            layer = self._next_layer
            pieces = self._places(layer, self._delivery.ready_layer(layer))
            settings = self._line.settings
            for file, part in self._page_locked.by_file(pieces):
                if all(file is not held for held in self.files):
                    self.files.append(file)
                tasks = part.joined().micro_tasks(settings.task_bytes, settings.pieces_max)
                self._tasks.extend(tasks)
            if not self._tasks:
                return pieces
        if (behind := self._behind) is not None:
            behind.followed_by(lane)
        return self._tasks.popleft()

    def queued(self, lane: Lane) -> None:
        self._used.add(lane.stream)
        if self._tasks:
            return
        # This lane's mark is then the layer's, and of all before it: a hold knows but one number.
        for stream in self._used - {lane.stream}:
            lane.follow(self._device.mark(stream))
        if self._marks and self._last_stream != lane.stream:
            lane.follow(self._marks[-1])
        self._last_stream = lane.stream
        number = self._next_layer - self._layers.start + 1
        if self._hold is not None:
            self._hold.raise_behind(lane, number)
        mark = self._device.mark(lane.stream)
        self._used.clear()
        with self._queued:
            self._marks.append(mark)
            self._next_layer += 1
            self._queued.notify_all()

    def fail(self, error: Exception) -> None:
        with self._queued:
            if self.over:
                return
            self._failure = error
            self._queued.notify_all()
        if self._hold is None:
            return
        # What raises the hold for the last time comes last: behind the copies that are queued.
        # Copies by copy engines, which alone have a hold, are all in one stream.
        try:
            self._hold.raise_behind(self._line.lanes[0], len(self._layers))
        except Unavailable:  # the device has failed, and does nothing any more
            self._hold.raise_now(len(self._layers))

    def _end_hold(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.raise_now(len(self._layers))
            hold.close()

    def __repr__(self) -> str:
        return f"<LayerLoad {len(self._marks)}/{len(self._layers)} layers queued>"
