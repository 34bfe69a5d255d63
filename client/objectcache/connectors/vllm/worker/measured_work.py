"""What a worker measures of its steps and loads, for the scheduler's side to choose by."""

from __future__ import annotations

import threading
from collections import deque

from objectcache.connectors.timing.compute_windows import BatchShape
from objectcache.connectors.vllm.plans import WorkerMeasures

KEPT = 64  # of each kind, until they are taken


class MeasuredWork:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._layers_s: deque[tuple[BatchShape, float]] = deque(maxlen=KEPT)
        self._loads: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._waited_before_s = 0.0

    def computed(self, shape: BatchShape, layer_s: float) -> None:
        """A layer of a step of this shape took so long."""
        with self._lock:
            self._layers_s.append((shape, layer_s))

    def loaded(self, payload_bytes: int, load_s: float) -> None:
        """A load came whole, so long after it was asked for."""
        with self._lock:
            self._loads.append((payload_bytes, load_s))

    def take(self, waited_s: float) -> WorkerMeasures:
        """What was measured since the last call; steps have waited for so long in all."""
        with self._lock:
            layers_s, loads = tuple(self._layers_s), tuple(self._loads)
            self._layers_s.clear()
            self._loads.clear()
            since_s, self._waited_before_s = waited_s - self._waited_before_s, waited_s
        return WorkerMeasures(layers_s, loads, since_s)

    def __repr__(self) -> str:
        return f"<MeasuredWork {len(self._layers_s)} steps, {len(self._loads)} loads>"
