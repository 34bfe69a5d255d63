"""All workers, and the jobs that wait for one: in order, and once more where a worker dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from objectcache_encodings.frames import SliceCodec
from objectcache_relay.decoding.jobs import DecodeJob, JobEnded
from objectcache_relay.decoding.worker_process import (
    ANY_CPU,
    SharedFile,
    WorkerEnded,
    WorkerProcess,
)
from objectcache_runtime.metrics.metric_cells import Counts
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError, Unavailable

JOBS_PER_WORKER = 2  # one is decoded while the next is there already
DEATHS_MAX = 2  # of workers with a job, which is blamed for the second
START_S = 30.0
QUICK_DEATH_S = 5.0  # a worker that lived no longer is followed by the next after a pause
PAUSE_S, PAUSE_S_MAX = 0.1, 5.0
NO_WORKER_DEATHS = 3  # quick ones in a row, with which it is not waited for the next worker
WATCH_S = 0.5
ENCODING_LABELS = {int(codec): codec.name.lower().replace("_", "-") for codec in SliceCodec}

logger = logging.getLogger("objectcache.relay.decoding")


@dataclass(frozen=True, slots=True)
class JobFailure:
    """Why a job was not done; with `damage`, `slice_index` is the slice that could not be
    decoded, or, where it `is_stored_so`, dequantised.
    """

    error: ObjectCacheError | None = None
    damage: str = ""
    slice_index: int = 0
    is_stored_so: bool = False


@dataclass(slots=True)
class PoolJob:
    """A job from when it is asked for until it has ended. `may_begin` is called before a worker is
    sent it, and raises what is in the way; `ended` is called once, in the event loop. `took` is
    called before with the seconds that it took a worker.
    """

    job: DecodeJob
    files: tuple[SharedFile, SharedFile]
    may_begin: Callable[[], None]
    ended: Callable[[JobFailure | None], None]
    deaths: int = 0
    took: Callable[[float], None] | None = None

    @property
    def decoded_bytes(self) -> int:
        """Bytes that it writes."""
        return self.job.decoded_bytes


class DecodeCounts:
    """Since the start."""

    def __init__(self) -> None:
        self.decoded_bytes = Counts[str]()  # by encoding, "plain" for slices as they are
        self.wire_bytes = Counts[str]()
        self.worker_deaths = Counts[str]()  # by how they ended


@dataclass(eq=False, slots=True)
class _Seat:
    """A place for a worker, on a processor of its own perhaps."""

    cpu: int
    worker: WorkerProcess | None = None
    began_s: float = 0.0
    quick_deaths: int = field(default=0)


class WorkerPool:
    """Used in the event loop of the main thread."""

    def __init__(self, workers: int, cpus: Sequence[int] = (), job_timeout_s: float = 10.0) -> None:
        """`cpus` are those that workers are pinned to, in turn; a worker that has not done a job
        within `job_timeout_s` is killed. A file that it maps before has time of its own.
        """
        places = list(cpus) or [ANY_CPU]
        self._seats = [_Seat(places[number % len(places)]) for number in range(workers)]
        self._job_timeout_s = job_timeout_s
        self._queue: deque[PoolJob] = deque()
        self._sent: dict[int, PoolJob] = {}
        self.queued_bytes = 0  # decoded bytes of jobs that have not ended
        self._files: weakref.WeakKeyDictionary[object, SharedFile] = weakref.WeakKeyDictionary()
        self._open_files: dict[int, SharedFile] = {}
        self._last_number = 0
        self._loop = asyncio.get_running_loop()
        self._all_ready = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.counts = DecodeCounts()

    @property
    def workers(self) -> int:
        """How many there are to be."""
        return len(self._seats)

    @property
    def ready_workers(self) -> int:
        """How many take jobs."""
        return len(self._ready())

    @property
    def pids(self) -> list[int]:
        """Of the workers' processes."""
        return [seat.worker.pid for seat in self._seats if seat.worker is not None]

    async def start(self) -> None:
        """Begin all workers. Raises `Unavailable` where they do not come up."""
        for seat in self._seats:
            self._begin(seat)
        try:
            async with asyncio.timeout(START_S):
                await self._all_ready.wait()
        except TimeoutError as error:
            await self.close()
            raise Unavailable(
                f"{self.workers} workers were to be ready within {START_S:g} s, "
                f"{self.ready_workers} were"
            ) from error
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Kill all workers: nothing is decoded any more, and jobs that are left fail. A second call
        has no effect.
        """
        self._is_closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        workers = [seat.worker for seat in self._seats if seat.worker is not None]
        for seat in self._seats:
            if seat.worker is not None:
                self._kill(seat, seat.worker)
        await asyncio.gather(*(worker.ended() for worker in workers), *self._replacing)
        left = [*self._sent.values(), *self._queue]
        self._sent.clear()
        self._queue.clear()
        for job in left:
            self._end(job, JobFailure(DeliveryFailed("the fetcher ends")))
        for number in list(self._open_files):
            self._forget(number)

    # --- files ---

    def share(
        self, owner: object, descriptor: int, length_bytes: int, *, is_target: bool
    ) -> SharedFile:
        """A file that workers may map for as long as `owner` lives; the same one again for the same
        owner. The caller keeps the descriptor. Raises `Unavailable` where the process may have no
        more of them.
        """
        file = self._files.get(owner)
        if file is None:
            self._last_number += 1
            number = self._last_number
            file = SharedFile(number, descriptor, length_bytes, is_target=is_target)
            self._files[owner] = self._open_files[number] = file
            weakref.finalize(owner, self._forget_soon, number).atexit = False
        return file

    def _forget_soon(self, number: int) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all workers
            self._loop.call_soon_threadsafe(self._forget, number)

    def _forget(self, number: int) -> None:
        file = self._open_files.pop(number, None)
        if file is None:
            return
        for seat in self._seats:
            if seat.worker is not None:
                seat.worker.close_file(file)
        file.close()

    # --- jobs ---

    def next_number(self) -> int:
        """For the next job."""
        self._last_number += 1
        return self._last_number

    def submit(self, jobs: Iterable[PoolJob]) -> None:
        """Have these done after all that were submitted before."""
        for job in jobs:
            self.queued_bytes += job.decoded_bytes
            self._queue.append(job)
        self._feed()

    def _end(self, job: PoolJob, failure: JobFailure | None) -> None:
        self.queued_bytes -= job.decoded_bytes
        job.ended(failure)

    def _ready(self) -> list[WorkerProcess]:
        workers = [seat.worker for seat in self._seats]
        return [worker for worker in workers if worker is not None and worker.is_ready]

    def _feed(self) -> None:
        """Send workers what they have room for."""
        if self._is_closed or self._has_no_worker:
            self._fail_queue()
        while self._queue:
            worker = min(self._ready(), key=lambda one: len(one.jobs), default=None)
            if worker is None or len(worker.jobs) >= JOBS_PER_WORKER:
                return
            self._send(worker, self._queue.popleft())

    def _send(self, worker: WorkerProcess, job: PoolJob) -> None:
        try:
            job.may_begin()
            worker.send(job.job, job.files)
        except ObjectCacheError as error:
            self._end(job, JobFailure(error))
            return
        self._sent[job.job.number] = job
        worker.jobs.add(job.job.number)

    def _job_ended(self, answer: JobEnded) -> None:
        job = self._sent.pop(answer.number)
        if job.took is not None:
            job.took(answer.took_s)
        if answer.error:
            failure = JobFailure(None, answer.error, answer.slice_index, answer.is_stored_so)
            self._end(job, failure)
            return
        for row in job.job.rows:
            encoding = ENCODING_LABELS[row.codec]
            self.counts.decoded_bytes.add(encoding, row.decoded_bytes)
            self.counts.wire_bytes.add(encoding, row.count * row.pitch_bytes)
        self._end(job, None)

    @property
    def _has_no_worker(self) -> bool:
        """Whether none takes jobs, and the next would not soon."""
        return not self._ready() and all(
            seat.quick_deaths >= NO_WORKER_DEATHS for seat in self._seats
        )

    def _fail_queue(self) -> None:
        waiting = list(self._queue)
        self._queue.clear()
        for job in waiting:
            self._end(
                job, JobFailure(Unavailable("no worker of the fetcher stays alive; see its log"))
            )

    # --- workers ---

    def _begin(self, seat: _Seat) -> None:
        """Have a new worker take a seat; where there is no process, again after a pause."""
        if self._is_closed:
            return
        seat.began_s = time.monotonic()
        try:
            worker = WorkerProcess(seat.cpu)
        except OSError as error:
            logger.error("no process for a worker: %s", error)
            self._begin_later(seat)
            self._feed()
            return
        seat.worker = worker
        self._loop.add_reader(worker.control.fileno(), self._heard, seat, worker)

    def _begin_later(self, seat: _Seat) -> None:
        seat.quick_deaths += 1
        pause_s = min(PAUSE_S_MAX, PAUSE_S * 2.0 ** (seat.quick_deaths - 1))
        self._loop.call_later(pause_s, self._begin, seat)

    def _heard(self, seat: _Seat, worker: WorkerProcess) -> None:
        try:
            for answer in worker.answers():
                self._job_ended(answer)
        except WorkerEnded:
            self._died(seat, worker)
        if len(self._ready()) == self.workers:
            self._all_ready.set()
        self._feed()

    def _died(self, seat: _Seat, worker: WorkerProcess) -> None:
        """Or stands still: another takes its place and its jobs, as soon as it writes nothing."""
        is_quick = time.monotonic() - seat.began_s < QUICK_DEATH_S
        self._kill(seat, worker)
        replacing = asyncio.create_task(self._replace(seat, worker, is_quick))
        self._replacing.add(replacing)
        replacing.add_done_callback(self._replacing.discard)

    def _kill(self, seat: _Seat, worker: WorkerProcess) -> None:
        self._loop.remove_reader(worker.control.fileno())
        seat.worker = None
        worker.kill()

    async def _replace(self, seat: _Seat, worker: WorkerProcess, is_quick: bool) -> None:
        """Its jobs are run once more, before all that wait; a new worker comes."""
        how = _how(await worker.ended())
        self.counts.worker_deaths.add(how)
        logger.warning("worker %d ended (%s) with %d jobs", worker.pid, how, len(worker.jobs))
        again: list[PoolJob] = []
        for number in sorted(worker.jobs):
            job = self._sent.pop(number)
            job.deaths += 1
            if job.deaths < DEATHS_MAX:
                again.append(job)
            else:
                error = DeliveryFailed(f"{DEATHS_MAX} workers ended while they decoded this")
                self._end(job, JobFailure(error))
        self._queue.extendleft(reversed(again))
        if self._is_closed:
            return
        if is_quick:
            self._begin_later(seat)
        else:
            seat.quick_deaths = 0
            self._begin(seat)
        self._feed()

    async def _watch(self) -> None:
        """Kill workers that stand still: their sockets tell the rest."""
        while True:
            await asyncio.sleep(WATCH_S)
            now_s = time.monotonic()
            for seat in self._seats:
                worker = seat.worker
                if worker is None:
                    continue
                is_late = not worker.is_ready and now_s - seat.began_s > START_S
                if is_late or worker.is_late(now_s, self._job_timeout_s):
                    logger.error("worker %d stands still", worker.pid)
                    self._died(seat, worker)

    def __repr__(self) -> str:
        return (
            f"<WorkerPool {self.ready_workers}/{self.workers} workers, {len(self._sent)} jobs at "
            f"work, {len(self._queue)} wait>"
        )


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit {status}"
