"""Blob stores that pass every call on to another one, and are far away or fail."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.blobs.blob_store import (
    BlobRead,
    BlobStore,
    StoreTimeout,
    failed,
)
from objectcache_storage_server.engines.passing_engine import passed_on

T = TypeVar("T")

DELAYED_DEPTH = 64  # batches under way


class PassingBlobStore(BlobStore):
    """A blob store that behaves as `inner` does; owns it, and closes it."""

    def __init__(self, inner: BlobStore) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.inner!r}>"

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        """Carry out one operation of the contract, by its method's name."""
        return action()

    create = passed_on(BlobStore.create)
    write = passed_on(BlobStore.write)
    flush = passed_on(BlobStore.flush)
    delete = passed_on(BlobStore.delete)
    open = passed_on(BlobStore.open)
    release = passed_on(BlobStore.release)
    begin_reads = passed_on(BlobStore.begin_reads)
    sizes = passed_on(BlobStore.sizes)
    close = passed_on(BlobStore.close)


class DelayingBlobStore(PassingBlobStore):
    """Reads take `delay_s()` each, any number of them at a time, as in a store that is far away."""

    def __init__(
        self, inner: BlobStore, delay_s: Callable[[], float], queue_depth: int = DELAYED_DEPTH
    ) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, queue_depth=queue_depth)
        self.in_flight_highest = 0
        self._delay_s = delay_s
        self._changed = threading.Condition()
        self._order = itertools.count()
        # When each is due, its place in line, its reads, and whether that is its deadline.
        self._due: list[tuple[float, int, Sequence[BlobRead], Future[None], bool]] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="delayed-reads", daemon=True)
        self._thread.start()

    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        future: Future[None] = Future()
        due_s = time.monotonic() + self._delay_s()
        with self._changed:
            entry = (min(due_s, deadline_s), next(self._order), reads, future, due_s > deadline_s)
            heapq.heappush(self._due, entry)
            self.in_flight_highest = max(self.in_flight_highest, len(self._due))
            self._changed.notify()
        return future

    def _run(self) -> None:
        while (due := self._next()) is not None:
            _, _, reads, future, is_too_late = due
            if not future.set_running_or_notify_cancel():
                continue
            if is_too_late:
                future.set_exception(StoreTimeout("the store did not answer in time"))
                continue
            error = self.inner.begin_reads(reads, float("inf")).exception()
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def _next(self) -> tuple[float, int, Sequence[BlobRead], Future[None], bool] | None:
        with self._changed:
            while self._due or not self._is_closing:
                if not self._due:
                    self._changed.wait()
                    continue
                wait_s = self._due[0][0] - time.monotonic()
                if wait_s <= 0 or self._is_closing:
                    return heapq.heappop(self._due)
                self._changed.wait(wait_s)
            return None

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()
        self.inner.close()


class FaultyBlobStore(PassingBlobStore):
    """Calls fail with probability `fault_rate`, the same for one seed, as a network fails them:
    `StoreTimeout` after the call was carried out, or `Unavailable` before.

    `fault_rate` may be changed at any time. Calls of one thread fail in the same order every time.
    """

    FAULTY = frozenset({"create", "write", "flush", "delete", "open", "begin_reads"})

    def __init__(self, inner: BlobStore, seed: int, fault_rate: float = 0.1) -> None:
        super().__init__(inner)
        self.fault_rate = fault_rate
        self.fault_count = 0
        self._seed = seed
        self._random = random.Random(seed)  # noqa: S311  repeatable faults, not secrets
        self._lock = threading.Lock()

    def call(self, operation: str, size_bytes: int, action: Callable[[], T]) -> T:
        with self._lock:
            fails = operation in self.FAULTY and self._random.random() < self.fault_rate
            is_carried_out = self._random.random() < 0.5
            self.fault_count += fails
        if not fails:
            return action()
        told = f"injected into {operation}: seed {self._seed}, fault {self.fault_count}"
        if not is_carried_out or operation in {"create", "open"}:  # nobody would close what it made
            raise Unavailable(told)
        action()
        raise StoreTimeout(told)

    def begin_reads(self, reads: Sequence[BlobRead], deadline_s: float) -> Future[None]:
        begun: list[Future[None]] = []

        def begin() -> Future[None]:
            begun.append(self.inner.begin_reads(reads, deadline_s))
            return begun[0]

        try:
            return self.call("begin_reads", 0, begin)
        except Unavailable as fault:
            return _failing_after(begun[0], fault) if begun else failed(fault)


def _failing_after(begun: Future[None], fault: Unavailable) -> Future[None]:
    """Ends with a fault when reads end, whichever way: until then they write to their landings. It
    cannot be cancelled.
    """
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    begun.add_done_callback(lambda _: future.set_exception(fault))
    return future
