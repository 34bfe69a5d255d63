"""A GPU that is emulated by its compute window: real waiting for real layers, and no computing."""

from __future__ import annotations

import time
from collections.abc import Callable

from objectcache_laboratory.calibration.knee import Sample


def prefill(
    wait_layer: Callable[[int], object], num_layers: int, window_s: float, started_s: float
) -> Sample:
    """Seconds from `started_s`, by time.monotonic, to the end of the last layer's computing.

    A layer is computed once it is there and the one before it is through; while it is computed the
    next one is waited for (paper, section 3.5). What computes is the clock, so a thread that wakes
    late loses nothing.
    """
    computed_s, first_layer_s = started_s, 0.0
    for layer in range(num_layers):
        wait_layer(layer)
        begun_s = max(computed_s, time.monotonic())
        if layer == 0:
            first_layer_s = begun_s - started_s
        computed_s = begun_s + window_s
        _sleep_until(begun_s)
    _sleep_until(computed_s)
    return Sample(computed_s - started_s, first_layer_s)


def _sleep_until(at_s: float) -> None:
    left_s = at_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
