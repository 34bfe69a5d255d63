"""When each layer of a prefill waited and computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTiming:
    """One layer of one prefill; readings of the engine's clock, in seconds."""

    layer: int
    wait_start_s: float  # the layer before was done, and this one's KV was asked for
    ready_s: float  # its KV was there
    compute_start_s: float  # its KV was copied into the engine's cache
    compute_end_s: float

    @property
    def stall_s(self) -> float:
        """Time in which the model had nothing to compute."""
        return self.ready_s - self.wait_start_s

    @property
    def compute_s(self) -> float:
        """Time of the layer's work: the copy of its KV into the cache, and the arithmetic."""
        return self.compute_end_s - self.ready_s
