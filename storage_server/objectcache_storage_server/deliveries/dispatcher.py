"""The dispatcher: reader threads carry out the fragments that the scheduler chooses.

Reader threads never wait for a client: a delivery without room is not ready, and is woken when room
comes back. Nor do they wait for an engine that has many reads under way: they begin as many as it
wants, and finish those that have landed, so that a link is filled whatever time a read takes. No
fault of one delivery, nor of the scheduler, ends a thread.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from objectcache_storage_server.deliveries.delivery import ServedDelivery
from objectcache_storage_server.scheduling.demand import Demand
from objectcache_storage_server.scheduling.fragments import Fragment
from objectcache_storage_server.scheduling.scheduler import NextFragment, Scheduler, Wait

FAULT_PAUSE_S = 0.05  # after a fault of the scheduler that chose nothing
FAULT_LOG_INTERVAL_S = 10.0
WAIT_S_MAX = 3600.0  # a thread cannot wait for every number of seconds; then it looks again

T = TypeVar("T")

logger = logging.getLogger("objectcache.storage_server.dispatcher")


class Dispatcher:
    """A fixed number of threads that read fragments, in the order that the scheduler chooses."""

    def __init__(
        self, thread_count: int, scheduler: Scheduler[ServedDelivery], queue_depth: int = 0
    ) -> None:
        """`queue_depth`: see `EngineCapabilities`. A fragment is one batch of reads, so as many
        fragments are begun before one has landed; with 0 each thread reads one at a time.
        """
        self._queue_depth = queue_depth
        self._under_way = 0  # begun, and not landed
        self._landed: deque[Callable[[], None]] = deque()  # what finishes each
        self._condition = threading.Condition()
        self._scheduler = scheduler
        self._closing = False
        self._fault_count = 0
        self._fault_logged_s = -math.inf
        self._threads = [
            threading.Thread(target=self._run, name=f"reader-{number}", daemon=True)
            for number in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def add(
        self,
        delivery: ServedDelivery,
        demand: Demand,
        *,
        pooled: bool = False,
        rate_max: float = math.inf,
        nic_bytes_per_s: float | None = None,
    ) -> None:
        """The delivery is new; it ends with `remove`."""
        with self._condition:
            self._scheduler.add(
                delivery,
                demand,
                time.monotonic(),
                pooled=pooled,
                rate_max=rate_max,
                nic_bytes_per_s=nic_bytes_per_s,
            )
            self._condition.notify_all()

    def wake(self, delivery: ServedDelivery) -> None:
        """The delivery has room again."""
        with self._condition:
            self._scheduler.wake(delivery, time.monotonic())
            self._condition.notify_all()

    def remove(self, delivery: ServedDelivery) -> None:
        """The delivery has ended; what it had goes to the others at once."""
        with self._condition:
            self._scheduler.remove(delivery, time.monotonic())
            self._condition.notify_all()

    def consumed(
        self, delivery: ServedDelivery, layers: int, compute_s: float | None = None
    ) -> None:
        """The client is through with the delivery's first `layers` layers; it computed this long on
        each, where that is known.
        """
        with self._condition:
            self._scheduler.consumed(delivery, layers, time.monotonic(), compute_s)

    def with_scheduler(self, act: Callable[[Scheduler[ServedDelivery]], T]) -> T:
        """What `act` returns, called under the lock: to look, or to configure."""
        with self._condition:
            result = act(self._scheduler)
            self._condition.notify_all()
            return result

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
            del work  # an idle thread must not keep a delivery alive

    def _next(self) -> Callable[[], None] | None:
        with self._condition:
            while not self._closing or self._landed or self._under_way:
                if self._landed:
                    return self._landed.popleft()
                if self._under_way and (self._closing or self._under_way >= self._queue_depth):
                    self._condition.wait()
                    continue
                now_s = time.monotonic()
                decision = self._decide(now_s)
                if isinstance(decision, NextFragment):
                    decision.job.taken = None
                    return self._reading(decision.job, decision.fragment)
                wait_s = decision.until_s - now_s
                is_forever = wait_s == math.inf
                self._condition.wait(None if is_forever else min(max(0.0, wait_s), WAIT_S_MAX))
            return None

    def _reading(self, delivery: ServedDelivery, fragment: Fragment) -> Callable[[], None]:
        """What a reader thread has to do for a fragment that was chosen. Called under the lock."""
        if not self._queue_depth:
            return partial(delivery.execute, fragment)
        self._under_way += 1
        return partial(delivery.begin, fragment, self._has_landed)

    def _has_landed(self, finish: Callable[[], None]) -> None:
        with self._condition:
            self._under_way -= 1
            self._landed.append(finish)
            self._condition.notify_all()

    def _decide(self, now_s: float) -> NextFragment[ServedDelivery] | Wait:
        try:
            return self._scheduler.next(now_s)
        except Exception:
            self._log_fault(now_s)
            return self._lost_fragment() or Wait(now_s + FAULT_PAUSE_S)

    def _log_fault(self, now_s: float) -> None:
        self._fault_count += 1
        if now_s - self._fault_logged_s >= FAULT_LOG_INTERVAL_S:
            self._fault_logged_s = now_s
            logger.exception("the scheduler failed, %d times since the start", self._fault_count)

    def _lost_fragment(self) -> NextFragment[ServedDelivery] | None:
        """A fragment that was taken when the scheduler failed: nobody would read it any more."""
        for flow in self._scheduler.flows():
            if flow.job.taken is not None:
                return NextFragment(flow.job, flow.job.taken)
        return None

    def close(self) -> None:
        """Stop the threads; what is being read is finished."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def __repr__(self) -> str:
        under_way = f"{self._under_way}/{self._queue_depth} batches under way"
        return f"<Dispatcher {len(self._threads)} threads, {under_way}, {self._scheduler!r}>"
