"""What the server is told of how a step consumes its loads: the compute window, layer by layer."""

from __future__ import annotations

from collections.abc import Callable

from objectcache.connectors.timing.compute_windows import BatchShape
from objectcache.connectors.timing.moments import Clock
from objectcache.connectors.timing.step_windows import Step, StepTiming, StepWindows
from objectcache.connectors.vllm.plans import LoadPlan, StepPlan


class LoadTimings:
    """Timings of the loads of the step under way. `of` may be called from any thread, the rest from
    the worker's alone; no call waits.

    Every delivery of a step has the step's window: it computes a layer of all its requests at once.
    """

    def __init__(
        self,
        clock: Clock,
        fingerprint: str,
        learned: Callable[[BatchShape, float], None] | None = None,
    ) -> None:
        """`learned` is that of `StepWindows`."""
        self._windows = StepWindows(clock, learned)
        self._fingerprint = fingerprint
        self._step: Step | None = None
        self._timings: dict[str, StepTiming] = {}

    def step_begins(self, plan: StepPlan) -> None:
        """The engine computes what the plan says."""
        self._step = Step(plan.batch)
        self._windows.step_begins(self._step)

    def loads_begin(self, plan: StepPlan) -> None:
        """The loads of the step are about to be asked for."""
        if not plan.loads or self._step is None:
            return
        window_s = self._windows.expected_s(plan.batch)
        computed_tokens = plan.batch.tokens or None
        timing = StepTiming(self._fingerprint, window_s, computed_tokens, self._step)
        self._timings = {load.request_id: timing for load in plan.loads}

    def of(self, plan: LoadPlan) -> StepTiming:
        """The timing of a load; one that belongs to no step is loaded as a whole."""
        return self._timings.get(plan.request_id) or StepTiming(self._fingerprint)

    def wait_begins(self) -> None:
        """The engine wants its next layer."""
        self._windows.wait_begins()

    def wait_ended(self, layer: int) -> None:
        """The engine computes this layer from now on."""
        self._windows.wait_ended(layer)

    def step_ends(self) -> None:
        """The engine is through with the step, or its calls are."""
        self._windows.step_ends()
        self._step, self._timings = None, {}

    def __repr__(self) -> str:
        return f"<LoadTimings {self._fingerprint}, {self._windows!r}>"
