"""Cells that count: histograms, counts by key, names within a bound."""

from __future__ import annotations

import threading

from objectcache_runtime.metrics.metric_cells import (
    OTHER,
    RATIOS,
    SECONDS,
    SHORT_SECONDS,
    BoundedNames,
    Cells,
    Counts,
    Histogram,
)


def test_an_observation_counts_in_every_bucket_that_it_fits() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        histogram.observe(value)
    buckets, total = histogram.buckets()
    assert buckets == [("1.0", 2), ("2.0", 3), ("4.0", 4), ("+Inf", 5)]
    assert (total, histogram.count) == (16.0, 5)


def test_bounds_rise() -> None:
    for bounds in (SECONDS, SHORT_SECONDS, RATIOS):
        assert list(bounds) == sorted(set(bounds))


def test_counts_and_cells_are_made_when_they_are_first_asked_for() -> None:
    counts: Counts[str] = Counts()
    counts.add("a")
    counts.add("a", 2.5)
    assert (counts["a"], counts["b"], counts.items()) == (3.5, 0, [("a", 3.5)])
    cells: Cells[str, Histogram] = Cells(Histogram)
    cells["x"].observe(1.0)
    assert cells["x"].count == 1
    assert [name for name, _ in cells.items()] == ["x"]


def test_nothing_is_lost_between_threads() -> None:
    histogram, counts = Histogram((1.0,)), Counts[str]()
    cells: Cells[int, Histogram] = Cells(Histogram)

    def count() -> None:
        for number in range(5000):
            histogram.observe(0.5)
            counts.add("a")
            cells[number % 7].observe(0.5)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (histogram.count, counts["a"]) == (20_000, 20_000)
    assert sum(cell.count for _, cell in cells.items()) == 20_000


def test_the_first_tenants_have_names_and_the_rest_is_one() -> None:
    names = BoundedNames(2)  # admin.tenants_in_metrics_max
    assert [names[name] for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]
    assert [BoundedNames(0)[name] for name in ("a", "b")] == [OTHER, OTHER]
