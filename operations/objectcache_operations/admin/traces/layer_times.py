"""A layer's times as a trace's pictures show them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from objectcache_schemas.operators.traces import LayerTrace


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One layer, in seconds from the request's arrival; None is not yet, or not known."""

    layer: int
    first_read_s: float | None
    ready_s: float | None
    compute_start_s: float | None  # when it was in place, and the layer before was done with
    consumed_s: float | None
    wait_s: float | None  # of the GPU, for this layer's bytes


def layer_times(layers: Iterable[LayerTrace]) -> Iterator[LayerTimes]:
    """Each layer, with when its compute began and how long the GPU waited for it.

    The GPU waits for the first layer from the request's arrival on, and for another from the end of
    the layer before. Layers that are reported together count as done at the same time.
    """
    free_s: float | None = 0.0  # since when the GPU has nothing else to do
    for layer in layers:
        start_s = wait_s = None
        if layer.ready_s is not None and free_s is not None:
            start_s, wait_s = max(layer.ready_s, free_s), max(0.0, layer.ready_s - free_s)
        yield LayerTimes(
            layer.layer, layer.first_read_s, layer.ready_s, start_s, layer.consumed_s, wait_s
        )
        free_s = layer.consumed_s
