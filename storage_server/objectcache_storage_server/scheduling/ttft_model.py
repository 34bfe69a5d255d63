"""What a delivery costs the GPU that waits for it (paper, section 3.5, Equations 3 and 4).

The GPU computes layer l once the layer is there and layer l - 1 is computed. So the first token
comes at the latest, over all layers, of the layer's arrival and the computing that is left then.
Times are counted from the beginning of the delivery.
"""

from __future__ import annotations

from collections.abc import Sequence

from objectcache_storage_server.scheduling.demand import Demand


def ttft_at_rate(demand: Demand, rate_bytes_per_s: float) -> float:
    """Seconds to the first token at a constant rate (Equation 3). An unknown window counts as 0."""
    transfer_s = demand.layer_bytes / rate_bytes_per_s
    window_s = demand.compute_window_s or 0.0
    return transfer_s + (demand.num_layers - 1) * max(transfer_s, window_s) + window_s


def ttft_of_arrivals(arrivals_s: Sequence[float], compute_window_s: float) -> float:
    """Seconds to the first token of a delivery whose layers arrive at these times, one or more."""
    num_layers = len(arrivals_s)
    return max(
        arrival_s + (num_layers - layer) * compute_window_s
        for layer, arrival_s in enumerate(arrivals_s)
    )


def stall_of_ttft(demand: Demand, ttft_s: float) -> float:
    """Seconds for which the GPU waits: all but its computing."""
    return max(0.0, ttft_s - demand.num_layers * (demand.compute_window_s or 0.0))


def added_ttft(demand: Demand, ttft_s: float, link_bytes_per_s: float) -> float:
    """Seconds more than the delivery would take alone on a link of that rate."""
    return ttft_s - ttft_at_rate(demand, link_bytes_per_s)
