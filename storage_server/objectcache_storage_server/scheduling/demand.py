"""A delivery as the policies see it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """`num_layers` layers of `layer_bytes` each, of which the GPU computes each for
    `compute_window_s` (paper: L, s and c). `weight` counts its stalls that many times.
    `rate_max`, bytes per second, is what its client wants at most. `nic` is the storage NIC that it
    goes to, by the name that its tenant gave it; empty where none was named.

    `compute_window_s` None is unknown: such a delivery does not join the pool. Where layers differ,
    as encoded ones do, `layer_bytes` is what they have in the mean, rounded down, and `rest_bytes`
    is what the payload has beyond that.
    """

    layer_bytes: int
    compute_window_s: float | None
    num_layers: int
    weight: float = 1.0
    tenant: str = ""
    rate_max: float = math.inf
    nic: str = ""
    rest_bytes: int = 0

    @property
    def payload_bytes(self) -> int:
        """Bytes of all layers."""
        return self.layer_bytes * self.num_layers + self.rest_bytes

    @property
    def zero_stall_rate(self) -> float:
        """Bytes per second from which no layer is late (paper: r*); infinite without a window."""
        if not self.compute_window_s:
            return math.inf
        return self.layer_bytes / self.compute_window_s
