"""Copies between host memory and one device beside what it computes."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable
from typing import Literal, Self

from objectcache.deliveries.delivery import Delivery
from objectcache.gpu.device import Device, Direction, Lane, Mark, Way
from objectcache.gpu.layer_load import LayerLoad, Places
from objectcache.gpu.line import Job, Line, LineSettings
from objectcache.gpu.links.checked_links import CheckedLinks
from objectcache.gpu.links.linked_device import LinkedDevice
from objectcache.gpu.page_locked_memory import PageLockedMemory
from objectcache.gpu.pieces import Pieces
from objectcache.gpu.plain_device import PlainDevice
from objectcache.landing.memory_file import MemoryFile
from objectcache.landing.targets import SharedMemoryTarget
from objectcache_schemas.errors import InvalidRequest

# Over several links a line hands on whole layers, which the links cut, so many at once.
_WHOLE = 1 << 62
LAYERS_AT_ONCE = 4
_BY_LINKS = LineSettings(Way.EACH, _WHOLE, LAYERS_AT_ONCE, _WHOLE)


class BlockSave(Job):
    """Blocks on their way out of a device. Made by `Copier.save`."""

    def __init__(
        self,
        line: Line,
        device: Device,
        parts: list[tuple[MemoryFile, Pieces]],
        behind: Mark | None,
    ) -> None:
        self._line = line
        self._device = device
        self._behind = behind
        settings = line.settings
        self.files = [file for file, _ in parts]
        self._tasks = deque(
            task
            for _, part in parts
            for task in part.joined().micro_tasks(settings.task_bytes, settings.pieces_max)
        )
        self._behind_streams: set[int] = set()
        self._marks: dict[int, Mark] = {}  # the last one of each stream
        self._failure: Exception | None = None
        self._queued = threading.Condition()

    def wait(self) -> None:
        """Sleep until the bytes are in host memory. The device's may be overwritten then.

        Raises `Unavailable` where the device has failed.
        """
        with self._queued:
            self._queued.wait_for(lambda: self.over)
            marks = list(self._marks.values())
        for mark in marks:
            mark.wait()
        if self._failure is not None:
            raise self._failure
        self.files.clear()

    @property
    def over(self) -> bool:
        return self._failure is not None or not self._tasks

    def due(self) -> int | None:
        return 0 if self._tasks else None

    def next_task(self, lane: Lane) -> Pieces:
        if self._behind is not None and lane.stream not in self._behind_streams:
            lane.follow(self._behind)
            self._behind_streams.add(lane.stream)
        return self._tasks[0]

    def queued(self, lane: Lane) -> None:
        with self._queued:
            self._marks[lane.stream] = self._device.mark(lane.stream)
            self._tasks.popleft()
            self._queued.notify_all()

    def fail(self, error: Exception) -> None:
        with self._queued:
            if self.over:
                return
            self._failure = error
            self._queued.notify_all()


def wait_for_all(saves: Iterable[BlockSave]) -> None:
    """Sleep until nothing of them is on its way. Raises what has failed first, if anything has."""
    failures: list[Exception] = []
    for save in saves:
        try:
            save.wait()
        except Exception as error:  # raised when the others have ended, too
            failures.append(error)
    if failures:
        raise failures[0]


class Copier:
    """Loads into and saves out of one device, each with a thread and streams of their own."""

    def __init__(
        self,
        device: Device,
        *,
        loads: LineSettings | None = None,
        saves: LineSettings | None = None,
        links: Literal["host", "direct"] | CheckedLinks = "direct",
    ) -> None:
        """`links` is what is copied over: "direct", the device's own link by `loads` and `saves`;
        several, those of `checked_links` with its own (MMA, section 3.4), which take of these two
        the ways of copying alone; "host", plain copies of memory that is not page-locked, as
        without a copier.

        Raises `InvalidRequest` for a way that the device has not and links of another device, and
        `Unavailable`.
        """
        self.device = device
        self.links = links
        self._ends = contextlib.ExitStack()
        with contextlib.ExitStack() as ends:
            beneath = PlainDevice(device) if links == "host" else device
            self.page_locked = PageLockedMemory(beneath)
            ends.callback(self.page_locked.close)
            self._saves = self._line(ends, beneath, Direction.SAVE, saves)
            self._loads = self._line(ends, beneath, Direction.LOAD, loads)
            self._ends = ends.pop_all()

    def _line(
        self,
        ends: contextlib.ExitStack,
        beneath: Device,
        direction: Direction,
        settings: LineSettings | None,
    ) -> Line:
        links = self.links
        if isinstance(links, CheckedLinks):
            if links.device is not self.device:
                raise InvalidRequest(f"the links are of {links.device!r}, not of {self.device!r}")
            ways = settings or LineSettings.best_of(self.device)
            copies = links.copies(direction, links.rates[direction], ways)
            ends.callback(copies.close)
            beneath, settings = LinkedDevice(beneath, copies), _BY_LINKS
        elif settings is None or links == "host":
            settings = LineSettings.best_of(beneath)
        line = Line(beneath, direction, settings)
        ends.callback(line.close)
        return line

    def lock_pages(self, target: SharedMemoryTarget) -> None:
        """Let the device reach a target's memory, for as long as there is one. Raises
        `Unavailable`.
        """
        self.page_locked.lock_pages(target.file)

    def load(
        self,
        delivery: Delivery,
        places: Places,
        stream: int | None = None,
        *,
        ahead: int | None = None,
    ) -> LayerLoad:
        """Copy a delivery's layers to where `places(layer, slices)` says, as they arrive.

        `slices` is uint8[chunk_count, slice_bytes], in memory that is page-locked. `places` is
        called in another thread. The first copy comes behind what is queued on `stream` now. With
        `ahead` no more layers than that are on the device at once: each is followed by another when
        it is released (`LayerLoad.release`), so that so many places serve all of them.
        """
        behind = None if stream is None else self.device.mark(stream)
        load = LayerLoad(
            self._loads, self._loads.device, self.page_locked, delivery, places, behind, ahead
        )
        self._loads.add(load)
        return load

    def save(self, pieces: Pieces, stream: int | None = None) -> BlockSave:
        """Copy blocks into host memory, behind what is queued on `stream` now.

        The memory file stays until the bytes are there, whether or not anybody else holds it.
        Raises `InvalidRequest` for memory that is not page-locked.
        """
        parts = self.page_locked.by_file(pieces)
        behind = None if stream is None else self.device.mark(stream)
        save = BlockSave(self._saves, self._saves.device, parts, behind)
        self._saves.add(save)
        return save

    def close(self) -> None:
        """End the threads, and unlock all memory. Loads and saves under way fail."""
        self._ends.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Copier {self.device!r}, {self._loads!r}, {self._saves!r}, {self.page_locked!r}>"
