"""The numbers behind metrics, cheap enough for every request; collectors read them at a scrape.

Cells are kept by whoever counts, so that counting looks up no labels by name. All may be used from
any thread.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from itertools import accumulate
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

OTHER = "other"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SHORT_SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0, 1.01, 1.05, 1.1, 1.5, 2.0)


class Histogram:
    """How many observations fell below each bound, and their sum."""

    __slots__ = ("_counts", "_lock", "_sum", "bounds")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one observation."""
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, as Prometheus writes them, and the sum."""
        with self._lock:
            counts, total = list(self._counts), self._sum
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(counts)), strict=True)), total


class Counts(Generic[K]):
    """Counts by key; the caller bounds the keys."""

    __slots__ = ("_counts", "_lock")

    def __init__(self) -> None:
        self._counts: dict[K, float] = {}
        self._lock = threading.Lock()

    def add(self, key: K, amount: float = 1) -> None:
        """Add to one count."""
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + amount

    def items(self) -> list[tuple[K, float]]:
        """The counts of now."""
        with self._lock:
            return list(self._counts.items())

    def __getitem__(self, key: K) -> float:
        return self._counts.get(key, 0)


class Cells(Generic[K, V]):
    """Cells by key, made when they are first asked for; the caller bounds the keys."""

    __slots__ = ("_cells", "_lock", "_make")

    def __init__(self, make: Callable[[], V]) -> None:
        self._make = make
        self._cells: dict[K, V] = {}
        self._lock = threading.Lock()

    def __getitem__(self, key: K) -> V:
        cell = self._cells.get(key)
        return self._add(key) if cell is None else cell

    def _add(self, key: K) -> V:
        with self._lock:
            return self._cells.setdefault(key, self._make())

    def items(self) -> Iterator[tuple[K, V]]:
        """The cells of now."""
        with self._lock:
            cells = list(self._cells.items())
        return iter(cells)


class BoundedNames:
    """The first names that are seen; those that come when all places are taken are one, `other`.

    `admin.tenants_in_metrics_max` bounds tenants: a label with a value for everybody would let
    anybody who may make users fill the memory of whoever collects metrics.
    """

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._names: dict[str, str] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> str:
        known = self._names.get(name)
        return self._add(name) if known is None else known

    def _add(self, name: str) -> str:
        with self._lock:
            if len(self._names) < self._names_max:
                self._names[name] = name
            return self._names.get(name, OTHER)
