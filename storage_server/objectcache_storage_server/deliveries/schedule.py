"""The schedule in force: as configured, as an operator changes it, and as it is carried out."""

from __future__ import annotations

import math
import threading
import time

from objectcache_schemas.limits import KIB
from objectcache_schemas.operators.schedule import ScheduledNic, ScheduleState, SetSchedule
from objectcache_storage_server.admission.gates import Gates
from objectcache_storage_server.deliveries.dispatcher import Dispatcher
from objectcache_storage_server.scheduling.schedule_book import ScheduleBook
from objectcache_storage_server.scheduling.scheduler import Scheduler
from objectcache_storage_server.scheduling.view_schedule import copy_nics, copy_schedule

FRAGMENT_BYTES_MIN = 64 * KIB
RATED_FRAGMENT_S = 0.25  # of a delivery at the rate that its client wants at most


class Schedule:
    """What deliveries ask of it, and what operators do. Thread-safe."""

    def __init__(
        self, book: ScheduleBook, gates: Gates, reader_threads: int, queue_depth: int
    ) -> None:
        """`queue_depth`: see `Dispatcher`."""
        self.reader_threads = reader_threads
        self.dispatcher = Dispatcher(
            reader_threads, Scheduler(book.configuration, time.monotonic()), queue_depth
        )
        self._book = book
        self._gates = gates
        self._lock = threading.Lock()
        book.on_change(self._changed_elsewhere)
        self._changed_elsewhere()  # what was changed since the book was read

    @property
    def policy(self) -> str:
        """The policy in force."""
        return self._book.configuration.policy

    @property
    def layerwise_threshold_bytes(self) -> int:
        """The threshold in force (paper, equation 2)."""
        return self._book.configuration.layerwise_threshold_bytes

    def paces(self, tenant: str) -> bool:
        """Whether there is a cap for this tenant or for all."""
        return self._book.paces(tenant)

    def fragment_bytes(
        self,
        wanted_bytes: int,
        slice_bytes: int,
        rate_bytes_per_s: float = math.inf,
        nic_bytes_per_s: float = math.inf,
    ) -> int:
        """The size of fragments: as wanted, or less where they would make the rate of the cap or of
        the NIC uneven or the delivery has a rate of its own, but a slice at least, which is
        verified whole.
        """
        capped_bytes = self.dispatcher.with_scheduler(
            lambda scheduler: scheduler.fragment_bytes_max(nic_bytes_per_s)
        )
        paced_bytes = min(capped_bytes, rate_bytes_per_s * RATED_FRAGMENT_S)
        least_bytes = min(wanted_bytes, max(slice_bytes, FRAGMENT_BYTES_MIN))
        return int(max(least_bytes, min(wanted_bytes, paced_bytes)))

    def change(self, request: SetSchedule) -> ScheduleState:
        """Keep an operator's changes, and put them in force for what runs and what comes."""
        self._book.change(request.changes, request.reset)
        with self._lock:  # not while the store is asked
            self._put_in_force()
        return self.state()

    def _changed_elsewhere(self) -> None:
        with self._lock:
            self._put_in_force()

    def _put_in_force(self) -> None:
        configuration = self._book.configuration
        self.dispatcher.with_scheduler(
            lambda scheduler: scheduler.configure(configuration, time.monotonic())
        )
        self._gates.entrance.configure(configuration.tenants)

    def state(self) -> ScheduleState:
        """The schedule in force, and what it does. The dispatcher is held up for a copy only."""
        now_s = time.monotonic()
        copied = self.dispatcher.with_scheduler(lambda scheduler: copy_schedule(scheduler, now_s))
        return copied.state(self._book.changes, self._gates.waiting)

    def nics(self) -> tuple[ScheduledNic, ...]:
        """The storage NICs that deliveries go to, or went to lately."""
        now_s = time.monotonic()
        return self.dispatcher.with_scheduler(lambda scheduler: copy_nics(scheduler, now_s))

    def __repr__(self) -> str:
        return f"<Schedule {self.dispatcher!r}>"
