"""A batch of reads that ends at its deadline, whatever the system that was asked does later.

What is read lands in memory of the store first, and is copied into the caller's under the batch's
lock, while it has not ended: so a read that hangs and comes back never writes to memory that is
somebody else's by then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from objectcache_storage_server.engines.blobs.blob_store import StoreTimeout
from objectcache_storage_server.engines.stores.shared_store import ObjectRead

GAP_BYTES_MAX = 64 * 1024  # between ranges, which is read too rather than asked twice
WATCH_S = 0.2  # between looks at the deadlines


class LandingBatch:
    """`task_count` tasks fill the landings; `future` is what the caller has."""

    def __init__(self, task_count: int, deadline_s: float) -> None:
        self.future: Future[None] = Future()
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._tasks_left = task_count
        self._is_running = False
        self._has_ended = not task_count
        if not task_count:
            self.future.set_result(None)

    @property
    def has_ended(self) -> bool:
        """Nothing lands any more."""
        return self._has_ended

    def land(self, reads: Sequence[ObjectRead], data: memoryview, begin_bytes: int) -> bool:
        """Copy ranges of an object into their landings; `data` is its bytes from `begin_bytes` on.
        False where the batch has ended.
        """
        source = np.frombuffer(data, np.uint8)
        with self._lock:
            if self._has_ended or not self._runs():
                return False
            for _, offset_bytes, landing in reads:
                first = offset_bytes - begin_bytes
                np.frombuffer(landing, np.uint8)[:] = source[first : first + landing.nbytes]
        return True

    def end_task(self) -> None:
        """A task has landed everything; the last one ends the batch."""
        with self._lock:
            self._tasks_left -= 1
            if self._tasks_left or self._has_ended:
                return
            self._has_ended = True
            if not self._runs():
                return
        self.future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the batch, if it has not ended."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            if not self._runs():
                return
        self.future.set_exception(error)

    def _runs(self) -> bool:
        """It cannot be cancelled from here on; false where it has been."""
        if not self._is_running:
            self._is_running = self.future.set_running_or_notify_cancel()
            self._has_ended |= not self._is_running
        return self._is_running


class DeadlineWatch:
    """A thread that ends batches at their deadlines, while there are any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches: set[LandingBatch] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="store-deadlines", daemon=True)
        self._thread.start()

    def watch(self, batch: LandingBatch) -> None:
        """End `batch` at its deadline, unless it ends sooner."""
        with self._changed:
            self._batches.add(batch)
            self._changed.notify()
        batch.future.add_done_callback(lambda _: self._forget(batch))

    def _forget(self, batch: LandingBatch) -> None:
        with self._changed:
            self._batches.discard(batch)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batches or self._is_closed)
                if self._is_closed:
                    return
                now_s = time.monotonic()
                late = [batch for batch in self._batches if batch.deadline_s <= now_s]
            for batch in late:
                batch.fail(StoreTimeout("read objects: no answer in time"))
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, WATCH_S)

    def close(self) -> None:
        """End the thread; no batch is under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()


def joined_ranges(
    reads: Sequence[ObjectRead], bytes_max: int, gap_bytes_max: int = GAP_BYTES_MAX
) -> list[list[ObjectRead]]:
    """Ranges of one object, in order of their offsets, in groups of neighbours: each is read at
    once, at most `bytes_max` unless it is a single range.
    """
    groups: list[list[ObjectRead]] = []
    begin_bytes = end_bytes = 0
    for read in reads:
        read_end_bytes = read.offset_bytes + read.landing.nbytes
        is_near = read.offset_bytes <= end_bytes + gap_bytes_max
        if groups and is_near and read_end_bytes - begin_bytes <= bytes_max:
            groups[-1].append(read)
            end_bytes = max(end_bytes, read_end_bytes)
        else:
            groups.append([read])
            begin_bytes, end_bytes = read.offset_bytes, read_end_bytes
    return groups
