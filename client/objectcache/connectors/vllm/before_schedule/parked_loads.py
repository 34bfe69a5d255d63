"""Deliveries into the blocks of requests that the engine has parked, beside its steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager

from objectcache.connectors.vllm.before_schedule.side_copies import SideCopies
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.store import Complaints
from objectcache.connectors.vllm.worker.block_copies import BlockCopies
from objectcache.connectors.vllm.worker.loads import CLOSING_S, Load, SharedByLoads
from objectcache.deliveries.delivery import Delivery
from objectcache_schemas.errors import Unavailable

logger = logging.getLogger("objectcache.connectors.vllm")
LOADS_MAX = 24  # at once; each has a connection, a client has 32, and puts need some


class ParkedLoads:
    """Loads that a step begins and any later one hears the end of.

    All methods are called from the worker's thread. A load lays its layers into the blocks in a
    thread of its own. It ends once: whole, cut short, failed or given up, within the timeout. Until
    its end was taken nobody else uses its blocks, and after that nothing is written to them. On a
    GPU its copies come behind the steps that were asked for before, and take as long as these.
    """

    def __init__(
        self,
        fetch: Callable[[LoadPlan], Delivery],
        copies: BlockCopies,
        timeout_s: float,
        side_copies: SideCopies,
        shared: SharedByLoads | None = None,
    ) -> None:
        """`timeout_s` bounds the wait for a load's layers, from its start to its last one.
        `shared` is what other loads of the same client have, too.
        """
        self._fetch = fetch
        self._copies = copies
        self._timeout_s = timeout_s
        self._side_copies = side_copies
        self._shared = shared or SharedByLoads()
        self._outage = self._shared.outage
        self._asking = ThreadPoolExecutor(LOADS_MAX, "objectcache-ask")
        self._laying = ThreadPoolExecutor(LOADS_MAX, "objectcache-lay", copies.enter_thread)
        self._lock = threading.Lock()
        self._under_way: dict[str, Load] = {}
        self._ended: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._complaints = Complaints(logger, "loading stored KV failed, its blocks are computed")
        self.loaded_blocks = 0
        self.load_count = 0
        self.load_seconds = 0.0

    @property
    def failures(self) -> int:
        """Requests whose blocks could not be loaded."""
        return self._complaints.count

    def start(self, plans: Iterable[LoadPlan]) -> None:
        """Ask for the blocks of requests; returns without waiting."""
        closing = self._shared.closing()
        for plan in plans:
            asked = self._asking.submit(self._ask, plan, closing)
            load = Load(plan, asked, self._copies, self._outage)
            with self._lock:
                self._under_way[plan.request_id] = load
            deadline_s = time.monotonic() + self._timeout_s
            self._laying.submit(self._run, load, deadline_s, self._side_copies.behind_steps())

    def give_up(self, request_ids: Iterable[str]) -> None:
        """Nobody wants these any more. They end soon, with all of their blocks failed; what is not
        under way is left alone.
        """
        with self._lock:
            loads = [self._under_way[name] for name in request_ids if name in self._under_way]
            for load in loads:
                load.given_up = True
        for load in loads:
            self._shared.closes(self._asking.submit(load.close))

    def take_ended(self) -> set[str]:
        """Requests whose loads have ended; each is told once.

        Their failed blocks are told by the next `take_failed_blocks`, or were told before.
        """
        with self._lock:
            ended, self._ended = self._ended, set()
        return ended

    def take_failed_blocks(self) -> set[int]:
        """Blocks that could not be loaded; each is told once."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    # --- the threads ---

    def _ask(self, plan: LoadPlan, before: frozenset[Future[None]]) -> Delivery:
        wait_for(before, CLOSING_S)  # they hold memory that this load is promised
        if rest_s := self._outage.rest_s:
            raise Unavailable(f"the store failed and is left alone for another {rest_s:.1f} s")
        return self._fetch(plan)

    def _run(self, load: Load, deadline_s: float, copying: AbstractContextManager[None]) -> None:
        try:
            with copying:
                for layer in range(len(self._copies.layers)):
                    if not load.given_up:
                        load.install(layer, deadline_s)
        except Exception as error:  # a device tells of a copy that failed when it is waited for
            load.fail(error)
        finally:
            load.end(len(self._copies.layers))
            load.stop()
            self._end(load)

    def _end(self, load: Load) -> None:
        """Its memory goes before its end is told, where that is quick: when all of it has come."""
        if load.failure is None:
            load.close()
        self._shared.ended(load)
        name = load.plan.request_id
        with self._lock:
            failed = load.plan.block_ids if load.given_up else load.failed_blocks
            del self._under_way[name]
            self._failed_blocks.update(failed)
            self._ended.add(name)
            self.loaded_blocks += len(load.plan.block_ids) - len(failed)
            self.load_count += 1
            self.load_seconds += load.seconds
        if load.failure is not None and not load.given_up:
            self._complaints.add(load.failure)
        load.close()

    def close(self) -> None:
        """Give up what is under way, and wait for its threads: none touches a block afterwards."""
        with self._lock:
            names = list(self._under_way)
        self.give_up(names)
        self._laying.shutdown(wait=True)
        self._asking.shutdown(wait=True)

    def __repr__(self) -> str:
        return f"<ParkedLoads {self.loaded_blocks} blocks, {self.failures} requests failed>"
