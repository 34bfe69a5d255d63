"""One direction of a device's link: a thread that queues micro-tasks, most urgent first."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from dataclasses import dataclass

from objectcache.gpu.device import CopyFailed, Device, Direction, Lane, Way
from objectcache.gpu.pieces import Pieces
from objectcache.landing.memory_file import MemoryFile
from objectcache_schemas.errors import InvalidRequest, Unavailable
from objectcache_schemas.limits import MIB

PIECES_MAX = 4096  # of a micro-task: what one call is given, and the kernel's table holds


@dataclass(frozen=True, slots=True)
class LineSettings:
    """How one direction is copied. Of the ways that do not slow down what a GPU computes, `STAGED`
    was the fastest (docs/gpu.md). A micro-task costs this process about as much processor time
    however long it is: hence long ones. Of 16 MiB, 4 at once were measured with contiguous layers;
    scattered pieces were measured with 8 at once.
    """

    way: Way = Way.STAGED
    task_bytes: int = 16 * MIB
    depth: int = 4  # micro-tasks on the link at once: what comes next is chosen so much ahead
    pieces_max: int = PIECES_MAX
    # (bytes, way): pieces that are so long on average, or less, go by this way; the shortest first.
    # `way` has those that are longer than all of these.
    ways: tuple[tuple[int, Way], ...] = ()

    @classmethod
    def best_of(cls, device: Device) -> LineSettings:
        """The defaults, by what the device can do."""
        ways = (Way.STAGED, Way.BATCH, Way.EACH)
        return cls(next(way for way in ways if way in device.ways))

    def __post_init__(self) -> None:
        for name in ("task_bytes", "depth", "pieces_max"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {getattr(self, name)}")
        sizes = [size_bytes for size_bytes, _ in self.ways]
        if sizes != sorted(set(sizes)) or min(sizes, default=1) < 1:
            raise InvalidRequest(f"ways must be of rising sizes of at least 1, got {sizes}")

    def way_of(self, task: Pieces) -> Way:
        """How a micro-task is copied."""
        if len(task) < 2:
            return Way.EACH
        piece_bytes = task.total_bytes / len(task)
        return next((way for most, way in self.ways if piece_bytes <= most), self.way)

    @property
    def every_way(self) -> frozenset[Way]:
        """Those that are used."""
        return frozenset({self.way, *(way for _, way in self.ways)})

    @property
    def takes_kernels(self) -> bool:
        """Whether one of them does."""
        return any(way.takes_kernels for way in self.every_way)


class Job(ABC):
    """What is copied by a line, in micro-tasks. All but `over` is called in the line's thread.

    `files` are those that it copies to or from. The line holds the list for as long as one of its
    micro-tasks is on a lane, whatever became of the job; the job clears it when nothing of it is on
    its way any more.
    """

    files: list[MemoryFile]

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether it has no more micro-tasks, now or later."""

    @abstractmethod
    def due(self) -> int | None:
        """How soon its next micro-task is needed, lower first; None while it has none.

        Called with the line's lock held: it waits for nothing. What it raises the job fails with.
        """

    @abstractmethod
    def next_task(self, lane: Lane) -> Pieces:
        """The next one, to be copied on this lane; without pieces where nothing is to be copied."""

    @abstractmethod
    def queued(self, lane: Lane) -> None:
        """It is on the lane."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Nothing more of it is copied: it is over. Without effect on one that is, whose marks
        tell what failed of it; waits for nothing and raises nothing.
        """


class Line:
    """Jobs of one direction, and lanes that they share. Thread-safe."""

    def __init__(self, device: Device, direction: Direction, settings: LineSettings) -> None:
        """Raises `InvalidRequest` for a way that the device has not; `Unavailable`."""
        if missing := settings.every_way - device.ways:
            names, others = (
                ", ".join(sorted(way.value for way in ways)) for ways in (device.ways, missing)
            )
            raise InvalidRequest(f"the device copies pieces by {names}, not by {others}")
        self.device = device
        self._direction = direction
        self.settings = settings
        self.lanes: list[Lane] = []
        self._lanes_lock = threading.Lock()  # held while they are closed, and while one is marked
        # Of the micro-task on the lane:
        self._files_of: dict[Lane, list[MemoryFile]] = {}
        self._job_of: dict[Lane, weakref.ref[Job]] = {}
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
            if not job.over:
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
        """Return when what is on the lanes now has arrived, or is on its way no more. Raises
        `Unavailable` where the device has failed.
        """
        with self._lanes_lock:
            streams = {lane.stream for lane in self.lanes}
            marks = [self.device.mark(stream) for stream in streams]
        for mark in marks:
            with contextlib.suppress(CopyFailed):  # of any job, which tells it
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
            self.device.enter_thread()
            for _ in range(settings.depth):
                # Copy engines take one copy after the other, in one stream with less ado.
                first = self.lanes[0] if self.lanes and not settings.takes_kernels else None
                self.lanes.append(self.device.lane(settings.task_bytes, settings.pieces_max, first))
        except Exception as error:  # raised in the thread that makes the line
            self._failure = error
            self._close_lanes()
            return
        finally:
            begun.set()
        for lane in itertools.cycle(self.lanes):
            if not self._serve(lane):
                break
        while (left := self._left()) is not None:
            left.fail(InvalidRequest("the copier was closed"))
            self._let_go(left)
        self._close_lanes()

    def _close_lanes(self) -> None:
        with self._lanes_lock:
            lanes, self.lanes = self.lanes, []
            for lane in reversed(lanes):
                with contextlib.suppress(Unavailable):  # of a device that has failed
                    lane.close()
        self._files_of.clear()
        self._job_of.clear()

    def _serve(self, lane: Lane) -> bool:
        """Queue a micro-task on a lane when it is idle; False when the line is closed. What comes
        next is chosen as late as can be.
        """
        try:
            self._free(lane)
        except Exception as error:  # the device has failed, and does not recover
            self._failure = error
        job, due, failure = self._take()
        if job is None:
            return False
        try:
            if failure is not None:
                job.fail(failure)
            else:
                lane.due = due
                self._copy(job, lane)
        except Exception as error:  # whatever it is, the line goes on with other jobs
            job.fail(error)
        finally:
            self._let_go(job)
        return True

    def _free(self, lane: Lane) -> None:
        """Wait until nothing is on the lane; what failed there fails its job alone."""
        try:
            lane.wait_idle()
        except CopyFailed as error:
            if (job := self._job_of[lane]()) is not None:
                job.fail(error)
        self._files_of.pop(lane, None)
        self._job_of.pop(lane, None)

    def _copy(self, job: Job, lane: Lane) -> None:
        if self._failure is not None:
            raise self._failure
        task = job.next_task(lane)
        if len(task):
            self._files_of[lane], self._job_of[lane] = job.files, weakref.ref(job)
            lane.copy(task, self._direction, self.settings.way_of(task))
        job.queued(lane)

    def _take(self) -> tuple[Job | None, int, Exception | None]:
        """A job, its due, and what it fails with if it does; no job when closed."""
        with self._changed:
            while not self._closed:
                self._busy, due, failure = self._first_due()
                if self._busy is not None:
                    return self._busy, due, failure
                self._changed.wait()
            return None, 0, None

    def _first_due(self) -> tuple[Job | None, int, Exception | None]:
        first: Job | None = None
        first_due = 0
        for job in self._jobs:
            try:
                due = job.due()
            except Exception as error:  # whatever it is, the line goes on with other jobs
                return job, 0, error
            # Of those that are due alike the oldest goes first.
            if due is not None and (first is None or due < first_due):
                first, first_due = job, due
        return first, first_due, None

    def _left(self) -> Job | None:
        """A job that the closed line has not failed yet."""
        with self._changed:
            self._busy = self._jobs.pop() if self._jobs else None
            return self._busy

    def _let_go(self, job: Job) -> None:
        # The caller has the job still: what goes with it goes when the lock is free.
        with self._changed:
            self._busy = None
            if job.over and job in self._jobs:
                self._jobs.remove(job)
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<Line {self._direction.value}, {len(self._jobs)} jobs, {self.settings!r}>"
