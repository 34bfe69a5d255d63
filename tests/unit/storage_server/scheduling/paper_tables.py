"""The paper's tables A8, A9 and A12, as far as the scheduler is measured by them."""

from __future__ import annotations

from typing import NamedTuple

from objectcache_schemas.limits import BYTES_PER_GBIT
from objectcache_storage_server.scheduling.demand import Demand

TOKEN_LAYER_BYTES = 4096  # Llama 3.1 8B, keys and values
NUM_LAYERS = 32
MARGIN_GBPS = 5.0
LINK_GBPS = 100.0
POLICIES = ("equal", "kv_prop", "bw_prop", "stall_opt", "calibrated_stall_opt")


class Workload(NamedTuple):
    """`allocations_gbps` is table A9: by request, in the order of POLICIES."""

    cap_gbps: float
    allocations_gbps: dict[str, tuple[float, ...]]

    @property
    def demands(self) -> list[Demand]:
        return [demand(request) for request in self.allocations_gbps]

    @property
    def cap_bytes_per_s(self) -> float:
        return self.cap_gbps * BYTES_PER_GBIT


# Table A8: context and hit rate; cached tokens, and milliseconds that a layer computes.
COMPUTE_WINDOWS = {
    "4K, 50%": (2048, 5.79),
    "4K, 87.5%": (3584, 1.98),
    "16K, 50%": (8192, 29.87),
    "16K, 87.5%": (14336, 8.80),
    "32K, 50%": (16384, 80.91),
    "32K, 87.5%": (28672, 23.85),
    "64K, 50%": (32768, 271.02),
    "64K, 87.5%": (57344, 75.75),
}

WORKLOADS = {
    "A": Workload(
        80.0,
        {
            "16K, 50%": (20.00, 5.82, 7.89, 8.99, 13.99),
            "16K, 87.5%": (20.00, 10.18, 46.85, 42.25, 27.25),
            "64K, 50%": (20.00, 23.27, 3.48, 3.96, 8.96),
            "64K, 87.5%": (20.00, 40.73, 21.78, 24.81, 29.81),
        },
    ),
    "B": Workload(
        50.0,
        {
            "16K, 50%": (12.50, 3.64, 4.93, 8.99, 8.26),
            "16K, 87.5%": (12.50, 6.36, 29.28, 12.35, 10.93),
            "64K, 50%": (12.50, 14.55, 2.17, 3.96, 8.96),
            "64K, 87.5%": (12.50, 25.45, 13.61, 24.70, 21.85),
        },
    ),
    "C": Workload(
        50.0,
        {
            "16K, 50%": (8.33, 2.60, 3.28, 5.76, 4.97),
            "16K, 87.5%": (8.33, 4.55, 19.45, 7.62, 6.58),
            "32K, 50%": (8.33, 5.19, 2.42, 6.64, 7.03),
            "32K, 87.5%": (8.33, 9.09, 14.36, 10.78, 9.30),
            "64K, 50%": (8.33, 10.39, 1.44, 3.96, 8.96),
            "64K, 87.5%": (8.33, 18.18, 9.04, 15.24, 13.15),
        },
    ),
}

# Table A12: added TTFT of all requests, milliseconds, as measured there; in the order of POLICIES.
ADDED_TTFT_MS = {
    "A": (1288.8, 1806.3, 3146.5, 1516.7, 730.3),
    "B": (3834.4, 4128.5, 11580.6, 2433.7, 2171.1),
    "C": (9745.3, 10160.3, 29081.6, 7453.0, 7888.9),
}


def demand(request: str) -> Demand:
    """A request of table A8, such as "16K, 87.5%"."""
    cached_tokens, window_ms = COMPUTE_WINDOWS[request]
    return Demand(cached_tokens * TOKEN_LAYER_BYTES, window_ms / 1e3, NUM_LAYERS)


def stall_at_rate(demand: Demand, rate_bytes_per_s: float) -> float:
    """Seconds for which the GPU waits at a constant rate: for the first layer, and then for what
    each transfer takes longer than a compute window (Equation 4).
    """
    transfer_s = demand.layer_bytes / rate_bytes_per_s
    late_s = max(0.0, transfer_s - (demand.compute_window_s or 0.0))
    return transfer_s + (demand.num_layers - 1) * late_s
