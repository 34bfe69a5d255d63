"""What the server is told of how SGLang's forwards consume their loads.

SGLang tells a linker which pages a request loads, and nothing of the batch. So what a batch
computes is taken from the lookups of its loads: the pages behind those that are loaded. Requests of
the batch that load nothing are not seen, nor what the device had of a prefix; the times of such
batches deviate, and are reported as they are.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from objectcache.connectors.timing.compute_windows import NOTHING_COMPUTED, BatchShape
from objectcache.connectors.timing.moments import Clock
from objectcache.connectors.timing.step_windows import Step, StepTiming, StepWindows

LOOKUPS_MAX = 4096  # of requests that wait; the oldest are forgotten
BATCHES_MAX = 16  # that began and whose forward has not


class BatchTimings:
    """Timings of the batches of one rank. Thread-safe; no call waits."""

    def __init__(
        self,
        clock: Clock,
        fingerprint: str,
        *,
        num_layers: int,
        page_tokens: int,
        step_tokens_max: int | None = None,
    ) -> None:
        """`step_tokens_max` is what a forward computes of one request at most."""
        self._windows = StepWindows(clock)
        self._fingerprint = fingerprint
        self._num_layers = num_layers
        self._page_tokens = page_tokens
        self._step_tokens_max = step_tokens_max
        self._tail_pages: OrderedDict[str, int] = OrderedDict()
        self._batches: OrderedDict[int, Step] = OrderedDict()
        self._layer = num_layers  # that the forward under way computes
        self._lock = threading.Lock()

    def looked_up(self, rid: str, tail_pages: int) -> None:
        """A request lacks so many whole pages of its prompt."""
        with self._lock:
            self._tail_pages[rid] = tail_pages
            self._tail_pages.move_to_end(rid)
            while len(self._tail_pages) > LOOKUPS_MAX:
                self._tail_pages.popitem(last=False)

    def batch_begins(self, index: int, loads: Sequence[tuple[str, int]]) -> StepTiming:
        """A batch is about to load so many pages for each of these requests."""
        with self._lock:
            shape = self._shape(loads)
            step = Step(shape)
            self._batches[index] = step
            while len(self._batches) > BATCHES_MAX:
                self._batches.popitem(last=False)
            window_s = self._windows.expected_s(shape)
        return StepTiming(self._fingerprint, window_s, shape.tokens or None, step)

    def forward_begins(self, index: int) -> None:
        """The forward of this batch begins; one that loads nothing has none, and is not timed."""
        with self._lock:
            step = self._batches.pop(index, None)
            self._layer = -1 if step is not None else self._num_layers
            self._windows.step_begins(step or Step(NOTHING_COMPUTED))

    def wait_begins(self, layer: int) -> None:
        """The forward asks for a layer; it does so for K and for V, of which the first counts."""
        with self._lock:
            if layer > self._layer:
                self._windows.wait_begins()

    def wait_ended(self, layer: int) -> None:
        """The layer is there, and is computed from now on."""
        with self._lock:
            if layer > self._layer:
                self._layer = layer
                self._windows.wait_ended(layer, ends_unseen=layer == self._num_layers - 1)

    def reset(self) -> None:
        """Forget requests and batches."""
        with self._lock:
            self._tail_pages.clear()
            self._batches.clear()

    def _shape(self, loads: Sequence[tuple[str, int]]) -> BatchShape:
        requests: list[tuple[int, int]] = []
        for rid, pages in loads:
            tail_pages = self._tail_pages.pop(rid, pages)
            # Behind the whole pages there is a part of one, half of one on average.
            computed = max(0, tail_pages - pages) * self._page_tokens + self._page_tokens // 2
            if self._step_tokens_max is not None:
                computed = min(computed, self._step_tokens_max)
            requests.append((max(1, computed), pages * self._page_tokens))
        return BatchShape.of(requests)

    def __repr__(self) -> str:
        return f"<BatchTimings {self._fingerprint}, {self._windows!r}>"


def timed_counter(counter_class: Any, num_layers: int, timings: BatchTimings) -> Any:
    """SGLang's `LayerWiseLoadCounter`, whose waits are noted."""

    class PacedCounter(counter_class):
        """Also tells when the forward asks for a layer, and has it."""

        def set_consumer(self, index: int) -> None:
            super().set_consumer(index)
            timings.forward_begins(index)

        def wait_until(self, threshold: int) -> None:
            timings.wait_begins(threshold)
            super().wait_until(threshold)
            timings.wait_ended(threshold)

    return PacedCounter(num_layers)
