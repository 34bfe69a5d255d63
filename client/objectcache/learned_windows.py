"""How long engines computed per layer in earlier deliveries, for those that cannot tell the server.

A response body has no way back, so the server cannot learn its consumer's pace. The client measures
it and sends it with the next request of the same shape.
"""

from __future__ import annotations

import statistics
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

SHAPES_MAX = 64  # least recently used ones are forgotten
DELIVERIES_MAX = 5  # of a shape; enough that one slow delivery does not count
# Shorter is copying, or calls that run ahead of a GPU: no pace that a scheduler could follow.
WINDOW_S_MIN = 100e-6


@dataclass(frozen=True, slots=True)
class FetchShape:
    """What compute times depend on, as far as a client can tell."""

    bucket: str
    chunk_count: int
    context_tokens: int | None
    fingerprint: str | None = None
    computed_tokens: int | None = None


class RememberedWindows:
    """Medians of the last deliveries by shape. Thread-safe."""

    def __init__(self) -> None:
        self._medians_s: OrderedDict[FetchShape, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, shape: FetchShape, layers_compute_s: list[float]) -> None:
        """A delivery has ended whose layers took so long each. None at all teach nothing."""
        if not layers_compute_s:
            return
        with self._lock:
            medians_s = self._medians_s.setdefault(shape, deque(maxlen=DELIVERIES_MAX))
            medians_s.append(statistics.median(layers_compute_s))
            self._medians_s.move_to_end(shape)
            while len(self._medians_s) > SHAPES_MAX:
                self._medians_s.popitem(last=False)

    def window_s(self, shape: FetchShape) -> float | None:
        """The compute window to expect; None where no delivery has shown one."""
        with self._lock:
            medians_s = self._medians_s.get(shape)
            if medians_s is None:
                return None
            self._medians_s.move_to_end(shape)
            window_s = statistics.median(medians_s)
        return window_s if window_s >= WINDOW_S_MIN else None

    def __repr__(self) -> str:
        return f"<RememberedWindows {len(self._medians_s)}/{SHAPES_MAX} shapes>"
