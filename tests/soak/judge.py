"""Whether servers stay flat: memory, descriptors and threads, sampled while they work. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

MIB = 1 << 20
# Of a process that works: allocators keep what they once needed, and pools fill up slowly.
RSS_GROWTH_MAX = 0.10
RSS_SLACK_BYTES = 24 * MIB
DESCRIPTORS_SLACK = 24
THREADS_SLACK = 8
# Of runs that are long enough for a slow leak to show above what allocators do.
SLOPE_SECONDS_MIN = 20 * 60.0
RSS_SLOPE_MAX = 8 * MIB  # an hour
HOUR_S = 3600.0
WARM_UP_PART = 1 / 3
SAMPLES_MIN = 9


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment."""

    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int


def drift(process: str, samples: Sequence[Sample]) -> list[str]:
    """What grew, in words; nothing where the process stayed flat.

    After the warm-up, the median of the last third is compared with that of the first. Of a run of
    SLOPE_SECONDS_MIN or more the memory's slope counts too.
    """
    assert len(samples) >= SAMPLES_MIN, f"{process}: {len(samples)} samples are too few to judge"
    warm = samples[int(len(samples) * WARM_UP_PART) :]
    third = len(warm) // 3
    early, late = warm[:third], warm[-third:]
    found: list[str] = []
    for name, growth_max in (
        ("rss_bytes", RSS_SLACK_BYTES + RSS_GROWTH_MAX * _median("rss_bytes", early)),
        ("descriptors", DESCRIPTORS_SLACK),
        ("threads", THREADS_SLACK),
    ):
        before, after = _median(name, early), _median(name, late)
        if after - before > growth_max:
            found.append(f"{process}: {name} grew from {before:.0f} to {after:.0f}")
    if samples[-1].at_s - samples[0].at_s >= SLOPE_SECONDS_MIN:
        slope = rss_slope(warm)
        if slope > RSS_SLOPE_MAX:
            found.append(f"{process}: rss_bytes grows by {slope / MIB:.1f} MiB an hour")
    return found


def rss_slope(samples: Sequence[Sample]) -> float:
    """Bytes an hour: the median slope between any two samples (Theil and Sen), which peaks and
    single steps do not move.
    """
    return HOUR_S * median(
        (later.rss_bytes - earlier.rss_bytes) / (later.at_s - earlier.at_s)
        for earlier, later in combinations(samples, 2)
    )


def _median(name: str, samples: Sequence[Sample]) -> float:
    return float(median(getattr(sample, name) for sample in samples))
