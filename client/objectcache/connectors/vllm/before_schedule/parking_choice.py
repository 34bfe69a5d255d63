"""Which requests are parked for their loads, where that is chosen for each of them. Pure.

A step that waits for layers holds up every request in it for what the load takes longer than the
step computes. To park the request instead costs it about a step: it is scheduled when the step that
runs then has ended, and computes nothing while it is loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

from objectcache.connectors.timing.compute_windows import (
    NOTHING_COMPUTED,
    BatchShape,
    WindowLearner,
)
from objectcache.connectors.vllm.plans import WorkerMeasures

LOADS_KEPT = 16  # the latest, of all ranks
STEPS_KEPT = 16


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """What a load and the step that waits for it will take, on one rank. None: not known yet.

    `compute_window_s` is what a layer of the step computes, `step_s` what a step takes otherwise,
    without waits for loads.
    """

    payload_bytes: int
    rate_bytes_per_s: float | None
    layer_count: int
    compute_window_s: float | None
    step_s: float | None

    @property
    def stall_s(self) -> float | None:
        """How much longer the step takes for the load; below 0 where it computes longer."""
        if self.rate_bytes_per_s is None or self.compute_window_s is None:
            return None
        load_s = self.payload_bytes / self.rate_bytes_per_s
        return load_s - self.layer_count * self.compute_window_s


def had_better_park(load: ExpectedLoad) -> bool:
    """Whether the load would hold its step up for longer than a step takes. Never of what is not
    known.
    """
    stall_s = load.stall_s
    return stall_s is not None and load.step_s is not None and stall_s > load.step_s


class ParkingChoice:
    """Chooses by what the engine's latest loads and steps took. Called from one thread."""

    def __init__(self, layer_count: int, chunk_bytes: int, step_tokens_max: int) -> None:
        """A rank has so many layers, and `chunk_bytes` of each chunk, of all of them together. A
        step computes up to `step_tokens_max` tokens.
        """
        self._layer_count = layer_count
        self._chunk_bytes = chunk_bytes
        self._step_tokens_max = step_tokens_max
        self._windows = WindowLearner()
        self._loads: deque[tuple[int, float]] = deque(maxlen=LOADS_KEPT)
        self._steps_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._planned: tuple[int, float] | None = None
        self._going_on = NOTHING_COMPUTED

    def planned(self, step: int, going_on: BatchShape, now_s: float) -> None:
        """The engine computes this step from now on. `going_on` is what its requests will compute
        in the next one.
        """
        self._planned = step, now_s
        self._going_on = going_on

    def reported(self, steps: Collection[int], measures: WorkerMeasures, now_s: float) -> None:
        """The workers are through with these steps, and have measured this."""
        if self._planned is not None and self._planned[0] in steps:
            self._steps_s.append(max(0.0, now_s - self._planned[1] - measures.waited_s))
            self._planned = None
        for shape, layer_s in measures.layers_s:
            self._windows.learn(shape, [layer_s])
        self._loads += measures.loads

    def expected(self, chunk_count: int, loaded_tokens: int, tokens: int) -> ExpectedLoad:
        """Of a request of so many tokens, of which `loaded_tokens` will not be computed, that loads
        so many chunks.
        """
        room = max(1, self._step_tokens_max - self._going_on.tokens)
        own = BatchShape.of([(min(tokens - loaded_tokens, room), loaded_tokens)])
        shape = BatchShape(own.tokens + self._going_on.tokens, own.pairs + self._going_on.pairs)
        return ExpectedLoad(
            payload_bytes=chunk_count * self._chunk_bytes,
            rate_bytes_per_s=self._rate_bytes_per_s(),
            layer_count=self._layer_count,
            compute_window_s=self._windows.window_s(shape),
            step_s=median(self._steps_s) if self._steps_s else None,
        )

    def _rate_bytes_per_s(self) -> float | None:
        """Of the latest loads, the large ones counting more; each had its share of the link."""
        took_s = sum(load_s for _, load_s in self._loads)
        return sum(loaded for loaded, _ in self._loads) / took_s if took_s > 0 else None

    def __repr__(self) -> str:
        return f"<ParkingChoice {len(self._loads)} loads, {self._windows!r}>"
