"""For which ratios of prefill to decode nodes storage NICs can be saturated (section 4.2).

Equations (1) to (9) for nodes that are alike: g GPUs with a compute NIC of B bytes/s each, one
storage NIC of s x B, memory of M bytes/s. docs/dual_path.md has what follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_dispatch.checks import check_at_least, check_positive


@dataclass(frozen=True, slots=True)
class RatioBound:
    """A bound on P/D, what sets it, and the paper's equation. Where it admits no ratio, a least one
    is infinite and a largest one is 0.
    """

    ratio: float
    by: str
    equation: str


@dataclass(frozen=True, slots=True)
class PdRange:
    """The least and the largest P/D; each bound is the tightest of `bounds` on its side."""

    least: RatioBound
    largest: RatioBound
    bounds: tuple[RatioBound, ...]

    @property
    def is_empty(self) -> bool:
        """No ratio is free of bottlenecks."""
        return self.largest.ratio < self.least.ratio or self.largest.ratio <= 0


def pd_ratio(
    gpus: int,
    storage_nic_bytes_per_s: float,
    compute_nic_bytes_per_s: float,
    memory_bytes_per_s: float | None = None,
    *,
    copies_over_compute_nic: bool = True,
) -> PdRange:
    """The range of P/D within which no compute NIC and no memory keeps storage NICs waiting.

    With the paper's CNIC-assisted copies s/(g-s) <= P/D <= min((g-2s)/s, (g-s)/2s, (M/Bs-3)/2).
    With copies over PCIe s/g <= P/D <= min(g/s, (M/Bs-3)/2). Without `memory_bytes_per_s` memory
    bounds nothing. Raises `InvalidRequest` for figures that are not positive.
    """
    check_at_least("gpus", gpus, 1)
    check_positive("storage_nic_bytes_per_s", storage_nic_bytes_per_s)
    check_positive("compute_nic_bytes_per_s", compute_nic_bytes_per_s)
    g, s = float(gpus), storage_nic_bytes_per_s / compute_nic_bytes_per_s
    if copies_over_compute_nic:
        # Equation (1) has no P/D: 2 s / g <= 1 or a prefill node cannot pass on what it reads.
        if 2 * s > g:
            least = RatioBound(float("inf"), "compute NICs out of prefill nodes", "(1)")
        else:
            least = RatioBound(s / (g - s), "compute NICs into prefill nodes", "(3)")
        upper = [
            RatioBound(max(0.0, g - 2 * s) / s, "compute NICs out of decode nodes", "(5)"),
            RatioBound(max(0.0, g - s) / (2 * s), "compute NICs into decode nodes", "(7)"),
        ]
    else:
        if s > g:
            least = RatioBound(float("inf"), "compute NICs out of prefill nodes", "(1)")
        else:
            least = RatioBound(s / g, "compute NICs into prefill nodes", "(3)")
        upper = [RatioBound(g / s, "compute NICs into decode nodes", "(7)")]
    if memory_bytes_per_s is not None:
        check_positive("memory_bytes_per_s", memory_bytes_per_s)
        ratio = max(0.0, memory_bytes_per_s / storage_nic_bytes_per_s - 3) / 2
        upper.append(RatioBound(ratio, "memory of decode nodes", "(8)"))
    largest = min(upper, key=lambda bound: bound.ratio)
    return PdRange(least, largest, (least, *upper))
