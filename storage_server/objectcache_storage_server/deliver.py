"""Running deliveries: reader threads carry out the fragments that the scheduler grants.

A delivery owns its opened objects and its transport, and lets both go when its last reader has
left, whichever way it ended. Reader threads never wait for a client: a delivery without room is not
ready, and is woken when room comes back.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError
from objectcache_storage_server.engines.base import OpenObjects
from objectcache_storage_server.plan import Fragment, Plan
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.scheduler import Grant, Scheduler
from objectcache_storage_server.tracing.recorder import DeliveryRecorder
from objectcache_storage_server.transports.base import Transport

T = TypeVar("T")

logger = logging.getLogger("objectcache.storage_server.deliver")


class DeliveryState(enum.Enum):
    """Life of a delivery."""

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"  # an error, or cancelled


class Delivery:
    """One retrieval under way.

    `on_admitted` is called under the dispatcher's lock when the scheduler lets it begin, with its
    rate in bytes per second, or None; again where that changes. `on_end` is called once, in
    whichever thread ended it, after the opened objects and the transport were let go.
    """

    def __init__(
        self,
        plan: Plan,
        opened: OpenObjects,
        transport: Transport,
        on_end: Callable[[Delivery], None],
        recorder: DeliveryRecorder,
        on_admitted: Callable[[float | None], None] = lambda rate: None,
    ) -> None:
        self.plan = plan
        self.name = recorder.request_id
        self._on_admitted = on_admitted
        self.window_source = ""  # of its compute window, for the operator's view
        self._recorder = recorder
        self.state = DeliveryState.RUNNING
        self.error: ObjectCacheError | None = None
        self._opened = opened
        self._transport = transport
        self._on_end = on_end
        self._fragments: Iterator[Fragment] = plan.fragments()
        self._next = next(self._fragments, None)
        self._progress = plan.progress()
        self._lock = threading.Lock()
        self._readers = 0
        self._ended = False

    @property
    def end_layer(self) -> int:
        """All delivered layers below this are in place."""
        return self._progress.end_layer

    def admitted(self, rate_bytes_per_s: float | None) -> None:
        """See `scheduling.flow.Job`."""
        self._on_admitted(rate_bytes_per_s)

    def take(self) -> Fragment | None:
        """See `scheduling.flow.Job`; the caller must `execute` what it gets."""
        with self._lock:
            fragment = self._next
            if fragment is None or self.state is not DeliveryState.RUNNING:
                return None
            if not self._transport.reserve(fragment.offset_bytes, fragment.length_bytes):
                return None
            self._next = next(self._fragments, None)
            self._readers += 1
            return fragment

    def execute(self, fragment: Fragment) -> None:
        """Read a fragment into the transport's memory, and announce what it completes."""
        error: ObjectCacheError | None = None
        begun_s = time.monotonic()
        self._recorder.fragment_begun(fragment.first_layer, begun_s)
        try:
            view = self._transport.memory(fragment.offset_bytes, fragment.length_bytes)
            self._opened.read_many(self.plan.reads(fragment), view)
        except ObjectCacheError as caught:
            error = caught
        except Exception as caught:
            logger.exception("delivery %s: reading failed", self.name)
            error = DeliveryFailed(f"reading failed: {type(caught).__name__}")
        now_s = time.monotonic()
        read_bytes = 0 if error else fragment.length_bytes
        self._recorder.fragment_read(fragment.first_layer, read_bytes, now_s - begun_s, now_s)
        with self._lock:  # once a fragment: readers of one delivery meet here
            self._readers -= 1
            if error is None:
                self._finish(fragment)
            else:
                self._fail(error)
            ends = self._ends_now()
        if ends:
            self._end()

    def _finish(self, fragment: Fragment) -> None:
        if self.state is not DeliveryState.RUNNING:
            return
        self._transport.written(fragment.offset_bytes, fragment.length_bytes)
        end_layer = self._progress.finish(fragment)
        if end_layer is None:
            return
        self._recorder.layers_ready(end_layer, time.monotonic())
        self._transport.announce(end_layer)
        if end_layer == self.plan.end_layer:
            self.state = DeliveryState.COMPLETE

    def fail(self, error: ObjectCacheError) -> None:
        """End the delivery with an error; no effect once it has ended."""
        with self._lock:
            self._fail(error)
            ends = self._ends_now()
        if ends:
            self._end()

    def _fail(self, error: ObjectCacheError) -> None:
        if self.state is DeliveryState.RUNNING:
            self.state = DeliveryState.FAILED
            self.error = error

    def _ends_now(self) -> bool:
        """Whether the caller has to call `_end`, outside of the lock."""
        if self._ended or self._readers or self.state is DeliveryState.RUNNING:
            return False
        self._ended = True
        return True

    def _end(self) -> None:
        self._opened.close()
        if self.error is not None:
            self._transport.fail(self.end_layer, self.error)
        self._transport.close()
        self._on_end(self)

    def __repr__(self) -> str:
        return f"<Delivery {self.name} {self.state.value}, layers below {self.end_layer} in place>"


class Dispatcher:
    """A fixed number of threads that read fragments, in the order that the scheduler grants."""

    def __init__(self, thread_count: int, scheduler: Scheduler[Delivery]) -> None:
        self._condition = threading.Condition()
        self._scheduler = scheduler
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"reader-{number}", daemon=True)
            for number in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def add(
        self,
        delivery: Delivery,
        demand: Demand,
        *,
        pooled: bool = False,
        rate_max: float = math.inf,
    ) -> None:
        """The delivery is new; it ends with `remove`."""
        with self._condition:
            self._scheduler.add(
                delivery, demand, time.monotonic(), pooled=pooled, rate_max=rate_max
            )
            self._condition.notify_all()

    def wake(self, delivery: Delivery) -> None:
        """The delivery has room again."""
        with self._condition:
            self._scheduler.wake(delivery, time.monotonic())
            self._condition.notify_all()

    def remove(self, delivery: Delivery) -> None:
        """The delivery has ended; what it had goes to the others at once."""
        with self._condition:
            self._scheduler.remove(delivery, time.monotonic())
            self._condition.notify_all()

    def consumed(self, delivery: Delivery, layers: int) -> None:
        """The client is through with the delivery's first `layers` layers."""
        with self._condition:
            self._scheduler.consumed(delivery, layers, time.monotonic())

    def with_scheduler(self, act: Callable[[Scheduler[Delivery]], T]) -> T:
        """What `act` returns, called under the lock: to look, or to configure."""
        with self._condition:
            result = act(self._scheduler)
            self._condition.notify_all()
            return result

    def _run(self) -> None:
        while (granted := self._next()) is not None:
            granted.job.execute(granted.fragment)
            del granted  # an idle thread must not keep a delivery alive

    def _next(self) -> Grant[Delivery] | None:
        with self._condition:
            while not self._closing:
                now_s = time.monotonic()
                decision = self._scheduler.next(now_s)
                if isinstance(decision, Grant):
                    return decision
                wait_s = decision.until_s - now_s
                self._condition.wait(None if wait_s == math.inf else max(0.0, wait_s))
            return None

    def close(self) -> None:
        """Stop the threads; each finishes the fragment it is reading."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def __repr__(self) -> str:
        return f"<Dispatcher {len(self._threads)} threads, {self._scheduler!r}>"
