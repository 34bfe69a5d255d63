"""What a run is judged by."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW_S = 1.0  # of NIC balance
LOADED_SHARE = 0.3  # of what all storage NICs could carry: windows with less say nothing of balance


@dataclass(frozen=True, slots=True)
class TimeSpread:
    """Of one time over all requests, seconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float] | array[float]) -> TimeSpread:
        """Zeros where there is none."""
        if not len(values):
            return cls(0.0, 0.0, 0.0)
        found = np.asarray(values, np.float64)
        p50, p99 = np.percentile(found, (50, 99))
        return cls(float(found.mean()), float(p50), float(p99))


@dataclass(frozen=True, slots=True)
class ClusterMeasures:
    """Of one run. Times are seconds of virtual time, `jct_s` from the first agent's start to the
    last one's end, `agent_s` an agent's own.

    `nic_max_over_mean` is the busiest storage NIC's bytes over the mean NIC's, of each window of
    `WINDOW_S` in which NICs carry `LOADED_SHARE` of what they could, weighted by its bytes; 1 where
    there is none. `nic_share` is what
    storage NICs carried of what they could, `gpu_share` how much of prefill groups' steps a mean
    GPU computed.
    """

    routes: str
    requests: int
    jct_s: float
    agent_s: TimeSpread
    ttft_s: TimeSpread
    ttst_s: TimeSpread
    tpot_s: TimeSpread
    dispatch_s: TimeSpread
    read_s: TimeSpread
    queue_s: TimeSpread
    prefill_s: TimeSpread
    nic_max_over_mean: float
    nic_share: float
    prefill_nic_bytes: float
    decode_nic_bytes: float
    gpu_share: float
    prompt_tokens_per_s: float


def max_over_mean(traffic: Sequence[Sequence[float]], loaded_bytes: float) -> float:
    """The most of each window, all together, over the means; a list of windows for each NIC.

    Windows in which the mean is less than `loaded_bytes` do not count; 1.0 where none does.
    """
    table = np.zeros((len(traffic), max(map(len, traffic))))
    for row, windows in zip(table, traffic, strict=True):
        row[: len(windows)] = windows
    means = table.mean(axis=0)
    loaded = (means >= loaded_bytes) & (means > 0)
    return float(table.max(axis=0)[loaded].sum() / means[loaded].sum()) if loaded.any() else 1.0
