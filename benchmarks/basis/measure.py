"""What one row of the results is, and the figures that one would work out by hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from objectcache_schemas.limits import GIB

# For the back-of-envelope figures: a server core of these years.
COPY_BYTES_PER_S_PER_THREAD = 5 * GIB
LOOPBACK_BYTES_PER_S = 3 * GIB
DISK_WRITE_BYTES_PER_S = 1 * GIB
DEVICE_READ_BYTES_PER_S = 2 * GIB
HTTP_ROUND_TRIP_S = 0.001
SDK_REQUEST_S = 0.002  # boto3's own work for one request, which threads do not share
KEY_PARSE_S = 0.5e-6  # decode and check one key in Python


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `samples` are in `unit`; `ratio` compares the medians."""

    group: str
    name: str
    unit: str
    samples: tuple[float, ...]
    ratio: float | None
    ratio_of: str  # what the ratio is a ratio of
    goal: str
    by_hand: str
    details: dict[str, object] = field(default_factory=dict)
    settings: str = ""  # that differ from the defaults
    ratios: tuple[float, ...] = ()  # of single rounds, where `ratio` is their median

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def p99(self) -> float:
        """99 of 100 are no slower; with few samples close to the worst."""
        return float(np.percentile(self.samples, 1 if self._higher_is_better else 99))

    @property
    def best(self) -> float:
        """The fastest, or smallest, sample."""
        return max(self.samples) if self._higher_is_better else min(self.samples)

    @property
    def worst(self) -> float:
        """The slowest, or largest, sample."""
        return min(self.samples) if self._higher_is_better else max(self.samples)

    @property
    def _higher_is_better(self) -> bool:
        return self.unit.endswith(("/s", "%"))


@dataclass(slots=True)
class Samples:
    """Seconds of several things, measured in turn so that a slow spell hits all of them."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def take(self, name: str, work: Callable[[], object]) -> None:
        """Time `work` once."""
        self.add(name, timed(work))

    def add(self, name: str, seconds: float) -> None:
        """Note one time."""
        self.seconds.setdefault(name, []).append(seconds)

    def median_s(self, name: str) -> float:
        """The middle time."""
        return statistics.median(self.seconds[name])


def timed(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def device_read_bytes() -> int:
    """Bytes that this process has had devices read, by /proc/self/io."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise LookupError("/proc/self/io has no read_bytes")


def rates(seconds: Sequence[float], count_bytes: int) -> tuple[float, ...]:
    """GiB/s."""
    return tuple(count_bytes / second / GIB for second in seconds)


def milliseconds(seconds: Sequence[float]) -> tuple[float, ...]:
    """Seconds as milliseconds."""
    return tuple(1000 * second for second in seconds)
