"""A delivery: its fragments are taken in order, read in any, announced in order, and it ends once.

A delivery owns its opened objects and its transport, and lets both go when its last reader has
left, whichever way it ended. Nothing that may take a while, no read and no announcement, happens
under its lock: `take` waits for that lock while everybody's scheduler waits for `take`.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError
from objectcache_storage_server.deliveries.plan import (
    Plan,
)
from objectcache_storage_server.engines.base import BegunReads, EndedReads, OpenObjects
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.transports.base import Transport

YIELD_S_MAX = 0.005  # that a delivery's readers give away to others: two of their time slices

logger = logging.getLogger("objectcache.storage_server.deliver")


class DeliveryState(enum.Enum):
    """Life of a delivery."""

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"  # an error, or cancelled


class ServedDelivery:
    """One retrieval under way.

    `on_admitted` is called under the dispatcher's lock when the scheduler lets it begin, with its
    rate in bytes per second, or None; again where that changes. `on_end` is called once, in
    whichever thread ended it, after the opened objects and the transport were let go, even where
    that failed.
    """

    def __init__(
        self,
        plan: Plan,
        opened: OpenObjects,
        transport: Transport,
        on_end: Callable[[ServedDelivery], None],
        recorder: DeliveryRecorder,
        on_admitted: Callable[[float | None], None] = lambda rate: None,
    ) -> None:
        self.plan = plan
        self.name = recorder.request_id
        self.window_source = ""  # of its compute window, for the operator's view
        self.state = DeliveryState.RUNNING
        self.error: ObjectCacheError | None = None
        self.end_layer = plan.first_layer  # all delivered layers below it were announced
        self.taken: Fragment | None = None  # last by `take`, until the dispatcher has it
        self._on_admitted = on_admitted
        self._recorder = recorder
        self._opened = opened
        self._transport = transport
        self._on_end = on_end
        self._fragments: Iterator[Fragment] = plan.fragments()
        self._next = next(self._fragments, None)
        self._progress = plan.progress()
        self._complete: deque[tuple[int, float]] = deque()  # to be announced: end layer, and when
        self._lock = threading.Lock()
        self._readers = 0
        self._begun: set[BegunReads] = set()  # by `begin`, and not finished
        self._settling = False  # a thread announces
        self._yield_left_s = YIELD_S_MAX
        self._ended = False

    @property
    def decoded_bytes(self) -> int:
        """Bytes that its client has in the end, for the operator's view."""
        return self.plan.decoded_bytes

    def admitted(self, rate_bytes_per_s: float | None) -> None:
        """See `delivery_flow.ScheduledJob`."""
        self._on_admitted(rate_bytes_per_s)

    def take(self) -> Fragment | None:
        """See `delivery_flow.ScheduledJob`; the caller must `execute` what it gets.

        Where no room can be claimed for a reason of its own the delivery fails, but ends only in
        `execute`: not under the scheduler's caller's lock.
        """
        with self._lock:
            fragment = self._next
            if fragment is None or self.state is not DeliveryState.RUNNING:
                return None
            try:
                if not self._transport.reserve(fragment.offset_bytes, fragment.length_bytes):
                    return None
                self._next = next(self._fragments, None)
            except Exception as caught:
                self._fail(self._fault("reserving", caught))
            self.taken = fragment
            return fragment

    def execute(self, fragment: Fragment) -> None:
        """Read a fragment into the transport's memory, and announce what it completes.

        Of a delivery that has failed nothing is read any more. Raises nothing.
        """
        if self._enter():
            self._leave(fragment, self._outcome(lambda: self._read(fragment)))
        self._settle()
        self._let_the_client_run()

    def begin(self, fragment: Fragment, landed: Callable[[Callable[[], None]], None]) -> None:
        """Begin to read a fragment, and do not wait for it.

        `landed` is called once, perhaps from here, with what is then to be called by a reader
        thread, also where nothing was read. Raises nothing.
        """
        if not self._enter():
            landed(self._settle)
            return
        begun_s = time.monotonic()
        reads = self._begin(fragment, begun_s)
        with self._lock:
            self._begun.add(reads)
            is_wanted = self.state is DeliveryState.RUNNING
        if not is_wanted:
            reads.cancel()
        finish = partial(self._finish_reading, fragment, begun_s, reads)
        reads.when_landed(partial(landed, finish))

    def _begin(self, fragment: Fragment, begun_s: float) -> BegunReads:
        begun: list[BegunReads] = []

        def begin() -> None:
            self._recorder.fragment_begun(fragment.first_layer, begun_s)
            view = self._transport.memory(fragment.offset_bytes, fragment.length_bytes)
            begun.append(self._opened.begin_reads(self.plan.reads(fragment), view))

        error = self._outcome(begin)
        return EndedReads(error) if error is not None else begun[0]

    def _finish_reading(self, fragment: Fragment, begun_s: float, reads: BegunReads) -> None:
        error = self._outcome(lambda: self._land(fragment, begun_s, reads.finish))
        with self._lock:
            self._begun.discard(reads)
        self._leave(fragment, error)
        self._settle()
        self._let_the_client_run()

    def _outcome(self, act: Callable[[], None]) -> ObjectCacheError | None:
        """What reading fails with."""
        try:
            act()
        except ObjectCacheError as caught:
            return caught
        except Exception as caught:
            return self._fault("reading", caught)
        return None

    def _let_the_client_run(self) -> None:
        """Yield the processor, once the client was told of its first layer.

        Readers take all of a processor, and the system's scheduler has whoever they wake wait for
        their time slices. Where nobody else wants the processor a yield costs nothing; where
        somebody does it may cost a whole slice, so a delivery gives away so much and no more.
        """
        has_begun = self.plan.first_layer < self.end_layer < self.plan.end_layer
        if has_begun and self._yield_left_s > 0:
            begun_s = time.monotonic()
            os.sched_yield()
            self._yield_left_s -= time.monotonic() - begun_s  # a reader's turn more does no harm

    def _enter(self) -> bool:
        with self._lock:
            if self.state is not DeliveryState.RUNNING:
                return False
            self._readers += 1
            return True

    def _read(self, fragment: Fragment) -> None:
        begun_s = time.monotonic()
        self._recorder.fragment_begun(fragment.first_layer, begun_s)

        def read() -> None:
            view = self._transport.memory(fragment.offset_bytes, fragment.length_bytes)
            self._opened.read_many(self.plan.reads(fragment), view)

        self._land(fragment, begun_s, read)

    def _land(self, fragment: Fragment, begun_s: float, read: Callable[[], None]) -> None:
        read_bytes = 0
        try:
            read()
            read_bytes = fragment.length_bytes
        finally:
            now_s = time.monotonic()
            self._recorder.fragment_read(fragment.first_layer, read_bytes, now_s - begun_s, now_s)
        if self.state is DeliveryState.RUNNING:
            self._transport.written(fragment.offset_bytes, fragment.length_bytes)

    def _leave(self, fragment: Fragment, error: ObjectCacheError | None) -> None:
        with self._lock:  # once a fragment: readers of one delivery meet here
            self._readers -= 1
            if error is not None:
                self._fail(error)
            elif self.state is DeliveryState.RUNNING:
                try:
                    self._finish(fragment)
                except Exception as caught:
                    self._fail(self._fault("counting what was read", caught))

    def _finish(self, fragment: Fragment) -> None:
        end_layer = self._progress.finish(fragment)
        if end_layer is None:
            return
        self._complete.append((end_layer, time.monotonic()))
        if end_layer == self.plan.end_layer:
            self.state = DeliveryState.COMPLETE

    def fail(self, error: ObjectCacheError) -> None:
        """End the delivery with an error; no effect once it is complete or has failed."""
        with self._lock:
            self._fail(error)
        self._settle()

    def _fail(self, error: ObjectCacheError) -> None:
        if self.state is DeliveryState.RUNNING:
            self.state = DeliveryState.FAILED
            self.error = error

    def _fault(self, doing: str, caught: Exception) -> DeliveryFailed:
        """What the client is told of a fault of ours; the log is told all. Call it in `except`."""
        logger.exception("delivery %s: %s failed", self.name, doing)
        return DeliveryFailed(f"{doing} failed: {type(caught).__name__}")

    # --- outside of the lock: announcing and ending ---

    def _settle(self) -> None:
        """Announce what is complete, then end the delivery if nothing is left to do for it.

        Whoever comes while another thread announces leaves it all to that thread.
        """
        self._cancel_unwanted()
        with self._lock:
            if self._settling:
                return
            self._settling = True
        while (complete := self._next_complete()) is not None:
            self._announce(*complete)
        if self._ends_now():
            self._end()

    def _next_complete(self) -> tuple[int, float] | None:
        """What to announce next; with None the caller is no longer the one that settles."""
        with self._lock:
            if self._complete:
                return self._complete.popleft()
            self._settling = False
            return None

    def _announce(self, end_layer: int, complete_s: float) -> None:
        try:
            self._recorder.layers_ready(end_layer, complete_s)
            self._transport.announce(end_layer)
            self.end_layer = end_layer
        except Exception as caught:
            error = self._fault("announcing", caught)
            with self._lock:
                self._complete.clear()
                if self.state is not DeliveryState.FAILED:  # not complete: it was not announced
                    self.state, self.error = DeliveryState.FAILED, error
            self._cancel_unwanted()

    def _cancel_unwanted(self) -> None:
        """Of a delivery that has failed, however it did, nobody waits for what is being read."""
        if self.state is not DeliveryState.FAILED:
            return
        with self._lock:
            unwanted = list(self._begun)
        for reads in unwanted:
            reads.cancel()

    def _ends_now(self) -> bool:
        """Whether the caller has to call `_end`."""
        with self._lock:
            is_busy = self._readers or self._settling or self._complete
            if self._ended or is_busy or self.state is DeliveryState.RUNNING:
                return False
            self._ended = True
            return True

    def _end(self) -> None:
        """Let everything go and tell everybody: no step is left out because another fails."""
        error = self.error
        self._attempt("closing its objects", self._opened.close)
        if error is not None:
            self._attempt("telling", lambda: self._transport.fail(self.end_layer, error))
        self._attempt("closing its transport", self._transport.close)
        self._attempt("ending", lambda: self._on_end(self))
        self._on_end = self._on_admitted = _ignore  # they hold whoever holds this delivery

    def _attempt(self, doing: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            logger.exception("delivery %s: %s failed", self.name, doing)

    def __repr__(self) -> str:
        return f"<Delivery {self.name} {self.state.value}, layers below {self.end_layer} announced>"


def _ignore(_: object) -> None:
    """Nobody is told any more."""
