"""One direction of a device's link: a thread that queues micro-tasks, most urgent first."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass

from objectcache.gpu.device import Device, Direction, Lane, Way
from objectcache.gpu.pieces import Pieces
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import MIB

PIECES_MAX = 4096  # of a micro-task: what one call is given, and the kernel's table holds


@dataclass(frozen=True, slots=True)
class LineSettings:
    """How one direction is copied. The defaults were the fastest on an H100 that do not slow down
    what it computes (docs/gpu.md): a micro-task costs this process about as much processor time
    however long it is.
    """

    way: Way = Way.STAGED
    task_bytes: int = 16 * MIB
    depth: int = 4  # micro-tasks on the link at once: what comes next is chosen so much ahead
    pieces_max: int = PIECES_MAX

    @classmethod
    def best_of(cls, device: Device) -> LineSettings:
        """The defaults, by what the device can do."""
        ways = (Way.STAGED, Way.BATCH, Way.EACH)
        return cls(next(way for way in ways if way in device.ways))

    def __post_init__(self) -> None:
        for name in ("task_bytes", "depth", "pieces_max"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {getattr(self, name)}")


class Job(ABC):
    """What is copied by a line, in micro-tasks. All but `over` is called in the line's thread."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether it has no more micro-tasks, now or later."""

    @abstractmethod
    def due(self) -> int | None:
        """How soon its next micro-task is needed, lower first; None while it has none."""

    @abstractmethod
    def next_task(self, lane: Lane) -> Pieces:
        """The next one, to be copied on this lane; without pieces where nothing is to be copied."""

    @abstractmethod
    def queued(self, lane: Lane) -> None:
        """It is on the lane."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Nothing more of it is copied."""


class Line:
    """Jobs of one direction, and lanes that they share. Thread-safe."""

    def __init__(self, device: Device, direction: Direction, settings: LineSettings) -> None:
        """Raises `InvalidRequest` for a way that the device has not; `Unavailable`."""
        if settings.way not in device.ways:
            names = ", ".join(sorted(way.value for way in device.ways))
            raise InvalidRequest(
                f"the device copies pieces by {names}, not by {settings.way.value}"
            )
        self._device = device
        self._direction = direction
        self.settings = settings
        self.lanes: list[Lane] = []
        self._jobs: list[Job] = []
        self._busy: Job | None = None
        self._closed = False
        self._changed = threading.Condition()
        begun = threading.Event()
        name = f"objectcache-{direction.value}"
        self._thread = threading.Thread(target=self._run, args=(begun,), name=name, daemon=True)
        self._failure: Exception | None = None
        self._thread.start()
        begun.wait()
        if self._failure is not None:
            raise self._failure

    def add(self, job: Job) -> None:
        """Copy it. The line calls it until it is over, or was removed."""
        with self._changed:
            if self._closed:
                raise InvalidRequest("the copier is closed")
            self._jobs.append(job)
            self._changed.notify_all()

    def wake(self) -> None:
        """A job may have a micro-task that it had not; from any thread."""
        with self._changed:
            self._changed.notify_all()

    def remove(self, job: Job) -> None:
        """Copy no more of it, and return when nothing of it is on its way. Raises `Unavailable`."""
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
            self._changed.wait_for(lambda: self._busy is not job)
        self.wait_quiet()

    def wait_quiet(self) -> None:
        """Return when what is on the lanes now has arrived. Raises `Unavailable`."""
        for mark in [self._device.mark(stream) for stream in {lane.stream for lane in self.lanes}]:
            mark.wait()

    def close(self) -> None:
        """End the thread; what is on its way arrives. Jobs that are not over fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # --- the line's thread ---

    def _run(self, begun: threading.Event) -> None:
        settings = self.settings
        try:
            self._device.enter_thread()
            for _ in range(settings.depth):
                # Copy engines take one copy after the other, in one stream with less ado.
                first = self.lanes[0] if self.lanes and not settings.way.takes_kernels else None
                self.lanes.append(
                    self._device.lane(settings.task_bytes, settings.pieces_max, first)
                )
        except Exception as error:  # raised in the thread that makes the line
            self._failure = error
            return
        finally:
            begun.set()
        for lane in itertools.cycle(self.lanes):
            if not self._serve(lane):
                break
        for job in self._jobs:
            job.fail(InvalidRequest("the copier was closed"))
        lanes, self.lanes = self.lanes, []
        for lane in reversed(lanes):
            lane.close()

    def _serve(self, lane: Lane) -> bool:
        """Queue a micro-task on a lane when it is idle; False when the line is closed. What comes
        next is chosen as late as can be.
        """
        try:
            lane.wait_idle()
        except Exception as error:  # the device has failed, and does not recover
            self._failure = error
        job = self._take()
        if job is None:
            return False
        try:
            self._copy(job, lane)
        except Exception as error:  # whatever it is, the line goes on with other jobs
            job.fail(error)
        finally:
            self._let_go()
        return True

    def _copy(self, job: Job, lane: Lane) -> None:
        if self._failure is not None:
            raise self._failure
        task = job.next_task(lane)
        if len(task):
            way = self.settings.way if len(task) > 1 else Way.EACH
            lane.copy(task, self._direction, way)
        job.queued(lane)

    def _take(self) -> Job | None:
        with self._changed:
            while not self._closed:
                self._jobs = [job for job in self._jobs if not job.over]
                dues = [(due, job) for job in self._jobs if (due := job.due()) is not None]
                if dues:  # of those that are due alike the oldest
                    self._busy = min(dues, key=lambda pair: pair[0])[1]
                    return self._busy
                self._changed.wait()
            return None

    def _let_go(self) -> None:
        with self._changed:
            self._busy = None
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<Line {self._direction.value}, {len(self._jobs)} jobs, {self.settings!r}>"
