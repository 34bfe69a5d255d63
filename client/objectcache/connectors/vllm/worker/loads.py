"""Deliveries into vLLM's paged KV: one a request, laid into its blocks layer by layer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager

from objectcache.connectors.store.outage import Outage, forget_frames
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.store import Complaints
from objectcache.connectors.vllm.worker.block_copies import BlockCopies, BlockLoad
from objectcache.deliveries.delivery import Delivery
from objectcache.deliveries.layer_progress import LayerProgress
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError, Unavailable

logger = logging.getLogger("objectcache.connectors.vllm")
THREADS = 8  # deliveries that are asked for at once
CLOSING_S = 1.0  # how long a load waits for those of the steps before it to be closed
_WHAT = "a load"


class Load:
    """One request's delivery. It ends whole, cut short, or failed; it never raises."""

    def __init__(
        self, plan: LoadPlan, asked: Future[Delivery], copies: BlockCopies, outage: Outage
    ) -> None:
        self.plan = plan
        self._copies = copies
        self._outage = outage
        self.failure: BaseException | None = None
        self.given_up = False  # nobody wants it: what fails of it says nothing of the store
        self._asked: Future[Delivery] | None = asked
        self._copying: BlockLoad | None = None
        self._installed: set[int] = set()
        self._blocks = len(plan.block_ids)  # that are stored
        self._begun_s = self._last_s = time.monotonic()
        self._arrival: tuple[LayerProgress, int] | None = None
        self.arrived: tuple[int, float] | None = None  # bytes, and seconds in which; of a whole one

    @property
    def failed_blocks(self) -> tuple[int, ...]:
        """Blocks that are not there: all, or those at the end that are stored no more."""
        return self.plan.block_ids[0 if self.failure is not None else self._blocks :]

    @property
    def seconds(self) -> float:
        """From when it was asked for until the last of its layers was in the blocks."""
        return self._last_s - self._begun_s

    def begin(self, deadline_s: float) -> None:
        """Wait for the store's answer until `deadline_s` (by time.monotonic), and begin to copy.

        Nothing is begun for a second time, nor after a failure. What is begun belongs to the
        calling thread, which alone goes on with it.
        """
        if self.failure is None and self._copying is None:
            with self._failing(0):
                self._begun(deadline_s)

    def install(self, layer: int, deadline_s: float) -> None:
        """Wait for a layer until `deadline_s`, and have it in the blocks for what the engine asks
        its device for from now on.

        Nothing is done for a second time, nor after a failure.
        """
        if self.failure is not None or layer in self._installed:
            return
        with self._failing(layer):
            self._blocks = self._begun(deadline_s).wait(layer, _left_s(deadline_s))
            self._installed.add(layer)
            self._last_s = time.monotonic()

    def _begun(self, deadline_s: float) -> BlockLoad:
        if self._copying is None:
            assert self._asked is not None
            delivery = self._asked.result(_left_s(deadline_s))
            self._copying = self._copies.load(delivery, self.plan.block_ids)
            layer_bytes = delivery.chunk_count * delivery.slice_bytes
            self._arrival = delivery.progress, layer_bytes * len(delivery.layers)
        return self._copying

    @contextmanager
    def _failing(self, layer: int) -> Generator[None]:
        try:
            yield
        except TimeoutError:
            self.fail(DeliveryFailed("no answer to a fetch in time", layer=layer))
        except Exception as error:  # whatever it is, these blocks are not there
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """None of its blocks is there, whatever was laid into them, and nothing more is."""
        forget_frames(error)
        self.failure = error
        self.stop()
        if isinstance(error, ObjectCacheError) and not self.given_up:
            self._outage.failed(_WHAT, error)

    def end(self, layer_count: int) -> None:
        """The step is over: a layer that nobody waited for was read before it was there."""
        if self.failure is None and self._copying and len(self._installed) == layer_count:
            with self._failing(layer_count - 1):
                self._copying.check()
        if self.failure is None and len(self._installed) == layer_count:
            self._outage.answered(_WHAT)
            self._note_arrival()
        elif self.failure is None and len(self._installed) < layer_count:
            self.failure = DeliveryFailed(
                f"the engine computed without waiting for {layer_count - len(self._installed)} of "
                f"{layer_count} layers (are CUDA graphs piecewise?)",
                layer=len(self._installed),
            )
            self.stop()

    def _note_arrival(self) -> None:
        if self._arrival is not None:
            progress, payload_bytes = self._arrival
            if (arrived_s := progress.arrived_s(progress.end_layer - 1)) is not None:
                self.arrived = payload_bytes, arrived_s - self._begun_s

    def stop(self) -> None:
        """Return when nothing is written into its blocks any more. Repeating has no effect."""
        copying, self._copying = self._copying, None
        self._arrival = None  # who listens to a delivery's progress holds its memory
        if copying is None:
            return
        try:
            copying.close()
        except Exception as error:  # a device that has failed
            self.failure = self.failure or error

    def close(self) -> None:
        """Let the delivery go; one that is still asked for is closed when it comes. From any
        thread. Nothing more can be begun; its memory goes when `stop` was called, too.
        """
        asked, self._asked = self._asked, None
        if asked is not None and not asked.cancel():
            asked.add_done_callback(_close)


def _let_go(load: Load) -> None:
    load.stop()
    load.close()


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def _close(asked: Future[Delivery]) -> None:
    if asked.exception() is None:
        asked.result().close()


class SharedByLoads:
    """What all of a worker's loads have in common: when the store is left alone, and deliveries
    that are let go, whose memory the next ones are promised. Called from the worker's thread alone,
    but for `outage` and `ended`.
    """

    def __init__(self, arrived: Callable[[int, float], None] | None = None) -> None:
        """`arrived` is told, from any thread, of each load that came whole: its bytes, and how many
        seconds after it was asked for the last of them were in host memory.
        """
        self.outage = Outage(logger)
        self._arrived = arrived
        self._closing: set[Future[None]] = set()

    def ended(self, load: Load) -> None:
        """Nothing more of the load arrives."""
        if self._arrived is not None and load.arrived is not None:
            self._arrived(*load.arrived)

    def closes(self, closed: Future[None]) -> None:
        """A delivery is let go in another thread."""
        self._closing.add(closed)

    def closing(self) -> frozenset[Future[None]]:
        """Those that are not gone yet."""
        self._closing = {closed for closed in self._closing if not closed.done()}
        return frozenset(self._closing)


class Loads:
    """The deliveries of the step under way. Called from the worker's thread alone."""

    def __init__(
        self,
        fetch: Callable[[LoadPlan], Delivery],
        copies: BlockCopies,
        timeout_s: float,
        shared: SharedByLoads | None = None,
    ) -> None:
        """`shared` is what other loads of the same client have, too."""
        self._fetch = fetch
        self._copies = copies
        self._timeout_s = self._left_s = timeout_s
        self._shared = shared or SharedByLoads()
        self._outage = self._shared.outage
        self._threads = ThreadPoolExecutor(THREADS, "objectcache-load", copies.enter_thread)
        self._under_way: list[Load] = []
        self._failed_blocks: set[int] = set()
        self._complaints = Complaints(logger, "loading stored KV failed, its blocks are computed")
        self.loaded_blocks = 0
        self.load_count = 0
        self.load_seconds = 0.0
        self.wait_seconds = 0.0

    @property
    def failures(self) -> int:
        """Requests whose blocks could not be loaded."""
        return self._complaints.count

    def start(self, plans: Sequence[LoadPlan]) -> None:
        """Ask for every request's blocks at once; returns without waiting."""
        self._left_s = self._timeout_s
        closing = self._shared.closing()
        for plan in plans:
            asked = self._threads.submit(self._ask, plan, closing)
            self._under_way.append(Load(plan, asked, self._copies, self._outage))

    def _ask(self, plan: LoadPlan, before: frozenset[Future[None]]) -> Delivery:
        wait_for(before, CLOSING_S)  # they hold the memory that this load is promised
        if rest_s := self._outage.rest_s:
            raise Unavailable(f"the store failed and is left alone for another {rest_s:.1f} s")
        return self._fetch(plan)

    def wait(self, layer: int) -> None:
        """Have a layer of every request in its blocks, or its blocks among the failed ones.

        All waits of a step share one timeout: a server that stands still, or brings each layer
        late, costs that and no more. What the model computes meanwhile does not count.
        """
        begun_s = time.monotonic()
        deadline_s = begun_s + self._left_s
        for load in self._under_way:  # what is copied beside the engine is begun for all first
            load.begin(deadline_s)
        for load in self._under_way:
            load.install(layer, deadline_s)
        waited_s = time.monotonic() - begun_s
        self._left_s -= waited_s
        self.wait_seconds += waited_s

    def end_step(self) -> None:
        """Nothing of the step is read any more."""
        for load in self._under_way:
            load.end(len(self._copies.layers))
            if load.failure is not None:
                self._complaints.add(load.failure)
            self._failed_blocks.update(load.failed_blocks)
            self.loaded_blocks += len(load.plan.block_ids) - len(load.failed_blocks)
            self.load_count += 1
            self.load_seconds += load.seconds
            self._shared.ended(load)
            self._shared.closes(self._threads.submit(_let_go, load))
        self._under_way.clear()

    def take_failed_blocks(self) -> set[int]:
        """Blocks that could not be loaded; each is told once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Give up what is under way."""
        self.end_step()
        self._threads.shutdown(wait=True)

    def __repr__(self) -> str:
        return f"<Loads {self.loaded_blocks} blocks, {self.failures} requests failed>"
