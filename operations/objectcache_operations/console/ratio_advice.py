"""`objectcache pd-ratio`: ranges of P/D without a bottleneck, and what sets them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from objectcache_dispatch import PdRange, RatioBound, pd_ratio
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import BYTES_PER_GBIT

WAYS = {  # how KV goes between a node's memory and its GPUs
    "copies over PCIe": False,
    "copies over the compute NIC": True,
}
BYTES_PER_GBYTE = 1e9
FIGURE_MIN, FIGURE_MAX = 1e-6, 1e9  # beyond them is no machine, and in between nothing overflows


def advise(
    gpus: int, snic_gbps: float, cnic_gbps: float, memory_gbytes_s: float | None
) -> Mapping[str, PdRange]:
    """The range for each way of copying. Raises `InvalidRequest`, naming the flag."""
    flags = {"--gpus": gpus, "--snic-gbps": snic_gbps, "--cnic-gbps": cnic_gbps}
    if memory_gbytes_s is not None:
        flags["--memory-gbytes-s"] = memory_gbytes_s
    for flag, figure in flags.items():
        if not FIGURE_MIN <= figure <= FIGURE_MAX:
            raise InvalidRequest(
                f"{flag} is {figure}; it must be from {FIGURE_MIN:g} to {FIGURE_MAX:g}"
            )
    return {
        way: pd_ratio(
            gpus,
            snic_gbps * BYTES_PER_GBIT,
            cnic_gbps * BYTES_PER_GBIT,
            None if memory_gbytes_s is None else memory_gbytes_s * BYTES_PER_GBYTE,
            copies_over_compute_nic=over_nic,
        )
        for way, over_nic in WAYS.items()
    }


def as_text(advice: Mapping[str, PdRange]) -> str:
    """A paragraph for each way."""
    lines = list[str]()
    for way, found in advice.items():
        least = found.least
        if found.is_empty:
            lines.append(f"{way}: no P/D ratio can keep all storage NICs busy")
        else:
            lines.append(f"{way}: P/D from {least.ratio:.3g} to {found.largest.ratio:.3g}")
        lines.append(_as_line("less", least))
        lines += [
            _as_line("more", bound)
            for bound in sorted(found.bounds[1:], key=lambda bound: bound.ratio)
        ]
    lines.append("Equations of DualPath (arXiv:2602.21548), section 4.2; P/D counts nodes.")
    return "\n".join(lines)


def _as_line(side: str, bound: RatioBound) -> str:
    """What of P/D a bound forbids: all of it, where no ratio is large or small enough."""
    is_all = bound.ratio in (0.0, float("inf"))
    forbidden = "at any ratio" if is_all else f"{side} than {bound.ratio:.3g}"
    return f"  {forbidden}: {bound.by}, {bound.equation}"


def as_json(advice: Mapping[str, PdRange]) -> str:
    """An infinite bound, where no ratio is large enough, is null."""
    ways = {
        way.replace(" ", "_"): {
            "is_empty": found.is_empty,
            "least": found.least,
            "largest": found.largest,
            "bounds": found.bounds,
        }
        for way, found in advice.items()
    }
    return msgspec.json.encode(ways).decode()
