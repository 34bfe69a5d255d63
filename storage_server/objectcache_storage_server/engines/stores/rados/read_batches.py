"""Batches of reads: begun by whoever asks, as far as they go, and ended by threads that wait."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.stores.rados.librados import RadosPool
from objectcache_storage_server.engines.stores.rados.operations import (
    Deadlines,
    Range,
    ReadAnswer,
)
from objectcache_storage_server.engines.stores.shared_store import (
    ObjectRead,
    StoreTimeout,
)

RANGES_MAX = 256  # of one operation
BATCH_OPERATIONS_MAX = 64  # of one batch, under way at a time
BATCH_BYTES_MAX = 32 * MIB  # the same; at least one operation


class RadosBatch:
    """The operations of a batch: one for each object, or several of `RANGES_MAX` ranges."""

    def __init__(
        self, deadlines: Deadlines, pool: RadosPool, reads: Sequence[ObjectRead], deadline_s: float
    ) -> None:
        self.future: Future[None] = Future()
        self._deadlines, self._pool, self._deadline_s = deadlines, pool, deadline_s
        self._reads = reads  # whose landings are kept
        self._waiting = deque(operations(reads))
        self._under_way: deque[ReadAnswer] = deque()
        self._under_way_bytes = 0
        self._error: BaseException | None = None
        self.is_begun = False

    def begin(self) -> bool:
        """Submit what may be under way at once; False where the future was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return False
        self.is_begun = True
        self._submit()
        return True

    def end(self) -> None:
        """Wait until everything is answered, submitting the rest meanwhile; end the future."""
        while self._under_way:
            answer = self._under_way.popleft()
            try:
                answer.end_filled()
            except BaseException as error:
                self._fail(error)
            self._under_way_bytes -= answer.size_bytes
            self._submit()
        if self._error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._error)

    def _submit(self) -> None:
        while self._waiting and (
            not self._under_way
            or (
                len(self._under_way) < BATCH_OPERATIONS_MAX
                and self._under_way_bytes < BATCH_BYTES_MAX
            )
        ):
            name, ranges = self._waiting.popleft()
            try:
                if time.monotonic() >= self._deadline_s:
                    raise StoreTimeout(f"{name}: the deadline has passed before it was asked for")
                answer = ReadAnswer(self._deadlines, self._pool, name, ranges, self._deadline_s)
            except BaseException as error:
                self._fail(error)
                return
            self._under_way.append(answer)
            self._under_way_bytes += answer.size_bytes

    def _fail(self, error: BaseException) -> None:
        """Nothing more is begun; what is under way must still end, as it writes to landings."""
        self._waiting.clear()
        self._error = self._error or error


def operations(reads: Sequence[ObjectRead]) -> Iterator[tuple[str, list[Range]]]:
    """The reads by object, in the order in which objects are first named. What follows each other
    in the object and in memory is one range: each costs an OSD some 30 us.
    """
    by_name: dict[str, list[Range]] = {}
    for name, offset_bytes, landing in reads:
        if not landing.nbytes:
            continue  # Ceph takes a length of 0 for the whole object
        ranges = by_name.setdefault(name, [])
        added = Range.into(landing, offset_bytes)
        if ranges and ranges[-1].is_before(added):
            size_bytes = ranges[-1].size_bytes + added.size_bytes
            ranges[-1] = ranges[-1]._replace(size_bytes=size_bytes)
        else:
            ranges.append(added)
    for name, ranges in by_name.items():
        for first in range(0, len(ranges), RANGES_MAX):
            yield name, ranges[first : first + RANGES_MAX]


class BatchThreads:
    """The threads that wait, each for one batch. As many batches are begun by who asks for them;
    more wait until a thread is free.
    """

    def __init__(self, count: int) -> None:
        self._queue: SimpleQueue[RadosBatch | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._count, self._begun = count, 0
        self._threads = [
            threading.Thread(target=self._run, name=f"rados-reads-{index}", daemon=True)
            for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, batch: RadosBatch) -> None:
        with self._lock:
            is_next = self._begun < self._count
            self._begun += 1
        if is_next:
            batch.begin()
        self._queue.put(batch)

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            if batch.is_begun or batch.begin():
                batch.end()
            del batch  # its landings are not kept until the next one comes
            with self._lock:
                self._begun -= 1
