"""Whether servers stay flat: memory, descriptors and threads, sampled while they work. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MIB = 1 << 20
# Of a process that works: allocators keep what they once needed, and pools fill up slowly.
RSS_GROWTH_MAX = 0.10
RSS_SLACK_BYTES = 24 * MIB
DESCRIPTORS_SLACK = 24
THREADS_SLACK = 8
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

    After the warm-up, the median of the last third is compared with that of the first.
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
    return found


def _median(name: str, samples: Sequence[Sample]) -> float:
    return float(median(getattr(sample, name) for sample in samples))
