"""The judge of a soak tells what grows from what only warms up."""

from __future__ import annotations

from collections.abc import Callable

from tests.soak.judge import MIB, Sample, drift

COUNT = 60


def samples(rss: Callable[[int], float], descriptors: Callable[[int], int]) -> list[Sample]:
    return [Sample(float(i), int(rss(i)), descriptors(i), 20) for i in range(COUNT)]


def flat(_: int) -> int:
    return 40


def test_a_process_that_warms_up_and_then_stays_is_flat() -> None:
    assert drift("p", samples(lambda i: min(i, 15) * 10 * MIB, flat)) == []


def test_memory_that_never_stops_growing_is_found() -> None:
    found = drift("p", samples(lambda i: (100 + 3 * i) * MIB, flat))
    assert len(found) == 1
    assert "rss_bytes grew" in found[0]


def test_descriptors_that_leak_are_found() -> None:
    found = drift("p", samples(lambda _: 100 * MIB, lambda i: 40 + 2 * i))
    assert found == ["p: descriptors grew from 86 to 134"] or "descriptors grew" in found[0]


def test_noise_is_no_growth() -> None:
    assert drift("p", samples(lambda i: (100 + i % 7) * MIB, lambda i: 40 + i % 5)) == []
