"""Deliveries into vLLM's paged KV: one a request, laid into its blocks layer by layer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from objectcache.connectors.store.outage import Outage, forget_frames
from objectcache.connectors.vllm.plans import LoadPlan
from objectcache.connectors.vllm.store import Complaints
from objectcache.connectors.vllm.worker.paged_layout import PagedLayer
from objectcache.deliveries.delivery import Delivery
from objectcache_schemas.errors import DeliveryFailed, ObjectCacheError, Unavailable

logger = logging.getLogger("objectcache.connectors.vllm")
THREADS = 8  # deliveries that are asked for at once
CLOSING_S = 1.0  # how long a load waits for those of the steps before it to be closed
_WHAT = "a load"


class Load:
    """One request's delivery. It ends whole, cut short, or failed; it never raises."""

    def __init__(self, plan: LoadPlan, asked: Future[Delivery], outage: Outage) -> None:
        self.plan = plan
        self._outage = outage
        self.failure: BaseException | None = None
        self.given_up = False  # nobody wants it: what fails of it says nothing of the store
        self._asked: Future[Delivery] | None = asked
        self._delivery: Delivery | None = None
        self._installed: set[int] = set()
        self._blocks = len(plan.block_ids)  # that are stored
        self._begun_s = self._last_s = time.monotonic()

    @property
    def failed_blocks(self) -> tuple[int, ...]:
        """Blocks that are not there: all, or those at the end that are stored no more."""
        return self.plan.block_ids[0 if self.failure is not None else self._blocks :]

    @property
    def seconds(self) -> float:
        """From when it was asked for until the last of its layers was in the blocks."""
        return self._last_s - self._begun_s

    def install(self, layer: int, paged: PagedLayer, deadline_s: float) -> None:
        """Wait for a layer until `deadline_s` (by time.monotonic), and lay it into the blocks.

        Nothing is done for a second time, nor after a failure.
        """
        if self.failure is not None or layer in self._installed:
            return
        try:
            if self._delivery is None:
                assert self._asked is not None
                self._delivery = self._asked.result(_left_s(deadline_s))
            slices = self._delivery.wait_layer(layer, _left_s(deadline_s))
            self._blocks = len(slices)
            paged.load(self.plan.block_ids[: self._blocks], slices)
            self._installed.add(layer)
            self._last_s = time.monotonic()
        except TimeoutError:
            self.fail(DeliveryFailed("no answer to a fetch in time", layer=layer))
        except Exception as error:  # whatever it is, these blocks are not there
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """None of its blocks is there, whatever was laid into them."""
        forget_frames(error)
        self.failure = error
        if isinstance(error, ObjectCacheError) and not self.given_up:
            self._outage.failed(_WHAT, error)

    def end(self, layer_count: int) -> None:
        """The step is over: a layer that nobody waited for was read before it was there."""
        if self.failure is None and len(self._installed) == layer_count:
            self._outage.answered(_WHAT)
        elif self.failure is None and len(self._installed) < layer_count:
            self.failure = DeliveryFailed(
                f"the engine computed without waiting for {layer_count - len(self._installed)} of "
                f"{layer_count} layers (are CUDA graphs piecewise?)",
                layer=len(self._installed),
            )

    def close(self) -> None:
        """Let the delivery go, and its memory; one that is still asked for is closed when it comes.
        Nothing else may be called afterwards.
        """
        asked, self._asked, self._delivery = self._asked, None, None
        if asked is not None and not asked.cancel():
            asked.add_done_callback(_close)


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def _close(asked: Future[Delivery]) -> None:
    if asked.exception() is None:
        asked.result().close()


class Loads:
    """The deliveries of the step under way. Called from the worker's thread alone."""

    def __init__(
        self,
        fetch: Callable[[LoadPlan], Delivery],
        layers: Sequence[PagedLayer],
        timeout_s: float,
    ) -> None:
        self._fetch = fetch
        self._layers = layers
        self._timeout_s = self._left_s = timeout_s
        self._outage = Outage(logger)
        self._threads = ThreadPoolExecutor(THREADS, "objectcache-load")
        self._under_way: list[Load] = []
        self._closing: set[Future[None]] = set()
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
        self._closing = {closed for closed in self._closing if not closed.done()}
        for plan in plans:
            asked = self._threads.submit(self._ask, plan, frozenset(self._closing))
            self._under_way.append(Load(plan, asked, self._outage))

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
        for load in self._under_way:
            load.install(layer, self._layers[layer], begun_s + self._left_s)
        waited_s = time.monotonic() - begun_s
        self._left_s -= waited_s
        self.wait_seconds += waited_s

    def end_step(self) -> None:
        """Nothing of the step is read any more."""
        for load in self._under_way:
            load.end(len(self._layers))
            if load.failure is not None:
                self._complaints.add(load.failure)
            self._failed_blocks.update(load.failed_blocks)
            self.loaded_blocks += len(load.plan.block_ids) - len(load.failed_blocks)
            self.load_count += 1
            self.load_seconds += load.seconds
            self._closing.add(self._threads.submit(load.close))
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
