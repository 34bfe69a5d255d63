"""The compute windows of an engine's steps: predicted, measured, learned, and told to the server.

A layer is computed from the end of the wait for it until the beginning of the wait for the next
one. What a connector copies into place while it waits does not count. On a device the times are
known later, so they are looked for whenever the engine comes by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from objectcache.connectors.timing.compute_windows import BatchShape, WindowLearner
from objectcache.connectors.timing.moments import Clock
from objectcache.deliveries.consumption import ConsumptionReports
from objectcache.deliveries.delivery import Delivery
from objectcache_schemas.compute_windows import WHOLE_S

STEPS_MAX = 8  # whose device may be behind; of older ones nothing is learned or told


@dataclass(slots=True)
class Step:
    """One step of the engine. Deliveries of its loads may join from any thread."""

    shape: BatchShape
    layers_s: list[float] = field(default_factory=list[float])
    _reports: list[ConsumptionReports] = field(default_factory=list[ConsumptionReports])

    def joins(self, reports: ConsumptionReports) -> None:
        """A delivery whose layers the step consumes; nothing is deduced of it any more."""
        reports.report_explicitly()
        self._reports.append(reports)

    def computed(self, layer: int, layer_s: float) -> None:
        """A layer took so long."""
        self.layers_s.append(layer_s)
        self._tell(layer, layer_s)

    def computed_as_others(self, layer: int) -> None:
        """A layer whose end nobody sees was computed like the others."""
        if self.layers_s:
            self._tell(layer, median(self.layers_s))

    def _tell(self, layer: int, layer_s: float) -> None:
        for reports in self._reports:
            reports.consumed(layer, layer_s)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What the fetches of a step say. Without a `step` nothing is computed between layers."""

    fingerprint: str
    window_s: float | None = WHOLE_S
    computed_tokens: int | None = None
    step: Step | None = field(default=None, repr=False)

    def begun(self, delivery: Delivery) -> None:
        """A delivery of the step is there: it hears what the step consumes."""
        if self.step is not None:
            self.step.joins(delivery.reports)


@dataclass(slots=True)
class _Layer:
    step: Step
    number: int
    begin: Any
    end: Any = None
    ends_step: bool = False
    unseen: int | None = None  # the step's last layer, whose end nobody sees


class StepWindows:
    """Called from the engine's thread alone; no call waits."""

    def __init__(
        self, clock: Clock, learned: Callable[[BatchShape, float], None] | None = None
    ) -> None:
        """`learned` is told of each step that has ended: its shape, and what a layer took."""
        self._clock = clock
        self._learned = learned
        self._learner = WindowLearner()
        self._step: Step | None = None
        self._running: _Layer | None = None
        self._computed: deque[_Layer] = deque()  # whose times are not known yet
        self._ended_count = 0  # steps that have ended and are in there

    def expected_s(self, shape: BatchShape) -> float | None:
        """The compute window of a step of this shape; None where it cannot be told yet."""
        self._look()
        return self._learner.window_s(shape)

    def step_begins(self, step: Step) -> None:
        """The engine is about to compute this. A step that never ended is ended."""
        self.step_ends()
        self._look()
        self._step = step

    def wait_begins(self) -> None:
        """The engine wants its next layer: it is through with the one before, or will be."""
        self._stop()
        self._look()

    def wait_ended(self, layer: int, *, ends_unseen: bool = False) -> None:
        """The engine has its layer, and computes it from now on. `ends_unseen` is said of a step's
        last layer where the engine tells nobody when it is through with that: the step is taken
        for ended.
        """
        self._stop()
        if self._step is None:
            return
        if ends_unseen:
            self._end(self._step, layer)
        else:
            self._running = _Layer(self._step, layer, self._clock.now())

    def step_ends(self) -> None:
        """The last layer that was waited for was the step's last one. Repeating has no effect."""
        self._stop()
        if self._step is not None:
            self._end(self._step, None)

    def _stop(self) -> None:
        if self._running is not None:
            self._running.end = self._clock.now()
            self._computed.append(self._running)
            self._running = None

    def _end(self, step: Step, unseen: int | None) -> None:
        self._step = None
        if self._computed and self._computed[-1].step is step:
            last = self._computed[-1]
            last.ends_step, last.unseen = True, unseen
            self._ended_count += 1
        else:
            self._learn(step, unseen)
        self._look()
        while self._ended_count > STEPS_MAX:
            self._ended_count -= self._computed.popleft().ends_step

    def _look(self) -> None:
        """Take the times that are known by now, in their order."""
        while self._computed:
            first = self._computed[0]
            layer_s = self._clock.between_s(first.begin, first.end)
            if layer_s is None:
                return
            self._computed.popleft()
            first.step.computed(first.number, layer_s)
            if first.ends_step:
                self._ended_count -= 1
                self._learn(first.step, first.unseen)

    def _learn(self, step: Step, unseen: int | None) -> None:
        if unseen is not None:
            step.computed_as_others(unseen)
        self._learner.learn(step.shape, step.layers_s)
        if self._learned is not None and step.layers_s:
            self._learned(step.shape, median(step.layers_s))

    def __repr__(self) -> str:
        return f"<StepWindows {self._learner!r}, {len(self._computed)} layers not measured yet>"
