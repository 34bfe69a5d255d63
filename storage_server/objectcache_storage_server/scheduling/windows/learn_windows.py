"""How long a layer computes, as learned from what clients say that they consumed. Pure."""

from __future__ import annotations

import math
import statistics
import threading
from collections import OrderedDict, deque
from typing import NamedTuple

SHAPES_MAX = 4096  # of all identities; the least recently used one of the greediest is forgotten
TIMES_KEPT = 64  # of a shape, the latest
TIMES_MIN = 8  # before that nothing is claimed
OUTLIER_FACTOR = 4.0  # from the median, either way
WINDOW_MAX_S = 3600.0
# Shorter is copying, or calls that run ahead of a GPU: no pace that a scheduler could follow.
WINDOW_MIN_S = 100e-6
STEPS_PER_OCTAVE = 4  # deliveries within 19 % of each other's tokens are of one shape


class DeliveryShape(NamedTuple):
    """What compute times depend on, as far as a server can tell; tokens in geometric steps."""

    bucket: str
    fingerprint: str  # what the client says that computes; empty where it does not say
    num_layers: int
    cached_step: int
    computed_step: int | None


def delivery_shape(
    bucket: str, fingerprint: str, num_layers: int, cached_tokens: int, computed_tokens: int | None
) -> DeliveryShape:
    """The shape of a delivery. What is computed counts, rather than the context that holds it: of a
    long context with little left to compute, a little more cached changes much.
    """
    computed = None if computed_tokens is None else _step(computed_tokens)
    return DeliveryShape(bucket, fingerprint, num_layers, _step(cached_tokens), computed)


class LearnedWindows:
    """Medians of the latest layer times, by identity and shape. Thread-safe.

    An identity can only spoil what it is told itself, and can only crowd out its own.
    """

    def __init__(self) -> None:
        self._times_s: dict[str, OrderedDict[DeliveryShape, deque[float]]] = {}
        self._shape_count = 0
        self._lock = threading.Lock()

    def learn(self, identity: str, shape: DeliveryShape, compute_s: float) -> None:
        """A layer took so long. What is no time is ignored."""
        if not (math.isfinite(compute_s) and 0 <= compute_s <= WINDOW_MAX_S):
            return
        with self._lock:
            shapes = self._times_s.setdefault(identity, OrderedDict())
            if shape not in shapes:
                shapes[shape] = deque(maxlen=TIMES_KEPT)
                self._shape_count += 1
            shapes[shape].append(compute_s)
            shapes.move_to_end(shape)
            if self._shape_count > SHAPES_MAX:
                self._forget_one()

    def window_s(self, identity: str, shape: DeliveryShape) -> float | None:
        """The compute window to expect; None where too little is known."""
        with self._lock:
            shapes = self._times_s.get(identity)
            times_s = shapes.get(shape) if shapes else None
            if shapes is None or times_s is None or len(times_s) < TIMES_MIN:
                return None
            shapes.move_to_end(shape)
            window_s = _typical(list(times_s))
        return window_s if window_s >= WINDOW_MIN_S else None

    def _forget_one(self) -> None:
        greediest = max(self._times_s, key=lambda identity: len(self._times_s[identity]))
        self._times_s[greediest].popitem(last=False)
        self._shape_count -= 1
        if not self._times_s[greediest]:
            del self._times_s[greediest]

    def __repr__(self) -> str:
        return f"<LearnedWindows {self._shape_count}/{SHAPES_MAX} shapes>"


def _typical(times_s: list[float]) -> float:
    """The median of those that are not far from all others' median."""
    middle_s = statistics.median(times_s)
    near = [s for s in times_s if middle_s / OUTLIER_FACTOR <= s <= middle_s * OUTLIER_FACTOR]
    return statistics.median(near or times_s)


def _step(tokens: int) -> int:
    return round(math.log2(tokens) * STEPS_PER_OCTAVE)
