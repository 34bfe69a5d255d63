"""What an engine has consumed of a delivery, deduced from its waits or told by it.

The meter is a state machine in which time is an argument; `ConsumptionReports` gives it a lock and
a clock.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from objectcache.deliveries.layer_progress import LayerProgress


@dataclass(frozen=True, slots=True)
class Consumption:
    """The engine is through with the layers below `end_layer`.

    `compute_s` is what each layer that this adds took it, waiting left out; `waited_s` is how long
    it stood still for all of them together, None where nobody saw it. `is_measured` tells that
    `compute_s` is the engine's own word, not what the host's clock shows between two calls.
    """

    end_layer: int
    compute_s: float
    waited_s: float | None = None
    is_measured: bool = False


class ConsumptionMeter:
    """Deduces consumption: who waits for another layer is through with those that it has.

    Between the return of a wait and the entry of the next one the engine computes. Waiting again
    for a layer that it has changes nothing. Once the engine reports by itself nothing is deduced
    any more.
    """

    def __init__(self, first_layer: int, end_layer: int) -> None:
        self._end_layer = end_layer
        self._held_end = first_layer  # layers below this have been given to the engine
        self._held_s = 0.0  # when the last of them was
        self._wait_begun_s: float | None = None
        self._waited_s = 0.0  # for layers that are held and not told of
        self._consumed_end = first_layer
        self._told_end = first_layer
        self._told_s: float | None = None
        self._explicit = False

    @property
    def told_end(self) -> int:
        """Layers below this were reported by the engine itself."""
        return self._told_end

    def wait_begins(self, layer: int, now_s: float) -> Consumption | None:
        """The engine asks for a layer: what it has consumed since it was last known."""
        if layer < self._held_end:
            return None
        consumption = self._consume_held(now_s)
        if self._wait_begun_s is None:  # else it is tried again
            self._wait_begun_s = now_s
        return consumption

    def wait_ended(self, layer: int, now_s: float) -> None:
        """The engine was given a layer."""
        if layer >= self._held_end:
            self._held_end = layer + 1
            self._held_s = now_s
            if self._wait_begun_s is not None:
                self._waited_s += now_s - self._wait_begun_s
                self._wait_begun_s = None

    def closed(self, now_s: float) -> Consumption | None:
        """The delivery was closed: an engine that had its last layer is through with it.

        One that leaves earlier may have dropped the layer that it held.
        """
        return self._consume_held(now_s) if self._held_end == self._end_layer else None

    def report_explicitly(self) -> None:
        """Deduce nothing from now on."""
        self._explicit = True

    def told(
        self, layer: int, compute_s: float | None, ready_s: float, now_s: float
    ) -> Consumption | None:
        """The engine reports that it is through with a layer; None where it had said so.

        Without `compute_s` it computed since its last report, or since `ready_s`, when the first
        layer that this adds had arrived, whichever is later. It waited from its last report until
        then; how long for its first layer nobody knows, since its calls run ahead of its GPU.
        """
        self._explicit = True
        count = layer + 1 - self._told_end
        if count <= 0:
            return None
        is_measured = compute_s is not None
        if compute_s is None:
            begun_s = ready_s if self._told_s is None else max(ready_s, self._told_s)
            compute_s = max(0.0, now_s - begun_s) / count
        waited_s = None if self._told_s is None else max(0.0, ready_s - self._told_s)
        self._told_end, self._told_s = layer + 1, now_s
        return Consumption(self._told_end, compute_s, waited_s, is_measured)

    def _consume_held(self, now_s: float) -> Consumption | None:
        count = self._held_end - self._consumed_end
        if self._explicit or count == 0:
            return None
        self._consumed_end = self._held_end
        waited_s, self._waited_s = self._waited_s, 0.0
        return Consumption(self._held_end, (now_s - self._held_s) / count, waited_s)


class ConsumptionReports:
    """Passes on what is consumed of one delivery. Thread-safe. It holds none of its memory.

    Nothing is deduced after the close. An engine that reports by itself may go on: its GPU is
    behind its calls. `tell` must not block: an engine's loop calls it. `ended` is called once, at
    the close.
    """

    def __init__(
        self,
        progress: LayerProgress,
        tell: Callable[[Consumption], None],
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._progress = progress
        self._meter = ConsumptionMeter(progress.first_layer, progress.end_layer)
        self._tell = tell
        self._ended = ended
        self._closed = False
        self._lock = threading.Lock()

    def wait_begins(self, layer: int) -> None:
        """See `ConsumptionMeter.wait_begins`."""
        with self._lock:
            if not self._closed:
                self._pass_on(self._meter.wait_begins(layer, time.monotonic()))

    def wait_ended(self, layer: int) -> None:
        """See `ConsumptionMeter.wait_ended`."""
        with self._lock:
            self._meter.wait_ended(operator.index(layer), time.monotonic())

    def report_explicitly(self) -> None:
        """See `ConsumptionMeter.report_explicitly`."""
        with self._lock:
            self._meter.report_explicitly()

    def consumed(self, layer: int, compute_s: float | None) -> None:
        """See `ConsumptionMeter.told`; of a layer that has not arrived nothing is told."""
        with self._lock:
            self._meter.report_explicitly()
            ready_s = self._progress.arrived_s(self._meter.told_end)
            if ready_s is not None and self._progress.arrived_s(layer) is not None:
                layer = operator.index(layer)  # a numpy integer would not go over the wire
                self._pass_on(self._meter.told(layer, compute_s, ready_s, time.monotonic()))

    def pass_on(self, consumption: Consumption) -> None:
        """Tell what somebody else has measured, to whom this process sends the layers on. From then
        on nothing is deduced here.
        """
        with self._lock:
            self._meter.report_explicitly()
            self._tell(consumption)

    def close(self) -> None:
        """The delivery was closed. Repeating has no effect."""
        with self._lock:
            if self._closed:
                return
            self._pass_on(self._meter.closed(time.monotonic()))
            self._closed = True
        if self._ended is not None:
            self._ended()

    def _pass_on(self, consumption: Consumption | None) -> None:
        if consumption is not None:
            self._tell(consumption)


def no_reports(progress: LayerProgress) -> ConsumptionReports:
    """For a delivery of which nobody wants to hear."""
    return ConsumptionReports(progress, _ignore)


def _ignore(_consumption: Consumption) -> None:
    """Nobody hears it."""
