"""Which delivery reads its next fragment: round robin over those that have room for one.

Pure: the dispatcher calls it under its lock, and a simulator can call it alone.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from objectcache_storage_server.plan import Fragment


class Job(Protocol):
    """A delivery as the schedule sees it."""

    def take(self) -> Fragment | None:
        """The next fragment, if there is one and its client's side has room for it."""
        ...


JobT = TypeVar("JobT", bound=Job)


class RoundRobin(Generic[JobT]):
    """Every ready job gets one fragment in turn. A job that yields none sleeps until `wake`."""

    def __init__(self) -> None:
        self._ready: deque[JobT] = deque()
        self._queued: set[JobT] = set()

    def wake(self, job: JobT) -> None:
        """Put a job into the round; no effect if it is in it."""
        if job not in self._queued:
            self._queued.add(job)
            self._ready.append(job)

    def next(self) -> tuple[JobT, Fragment] | None:
        """The next job and its fragment, or None when no job can go on."""
        while self._ready:
            job = self._ready.popleft()
            fragment = job.take()
            if fragment is not None:
                self._ready.append(job)
                return job, fragment
            self._queued.discard(job)
        return None

    def __repr__(self) -> str:
        return f"<RoundRobin {len(self._ready)} ready>"
