"""The judge of a soak tells what grows from what only warms up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.soak.judge import MIB, Sample, drift, rss_slope

COUNT = 60
HOUR_S = 3600.0


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


# --- slopes -------------------------------------------------------------------------------------


def long_samples(
    seconds: float, rss_mib: Callable[[float], float], count: int = 120, threads: int = 4
) -> list[Sample]:
    every_s = seconds / (count - 1)
    return [
        Sample(number * every_s, int(rss_mib(number * every_s) * MIB), 20, threads)
        for number in range(count)
    ]


def leaking(mib_an_hour: float) -> Callable[[float], float]:
    noise = random.Random(7)
    return lambda at_s: 100 + mib_an_hour * at_s / HOUR_S + noise.uniform(-1, 1)


@pytest.mark.parametrize(("mib_an_hour", "is_found"), [(0.0, False), (5.0, False), (12.0, True)])
def test_a_slow_leak_shows_in_a_long_run_long_before_it_is_large(
    mib_an_hour: float, is_found: bool
) -> None:
    found = drift("gateway", long_samples(HOUR_S, leaking(mib_an_hour)))
    assert bool(found) == is_found
    assert all("MiB an hour" in words for words in found)


def test_a_short_run_says_nothing_of_slopes() -> None:
    assert drift("gateway", long_samples(19 * 60.0, leaking(30.0))) == []
    assert drift("gateway", long_samples(20 * 60.0, leaking(30.0))) != []


def test_what_grows_only_while_it_warms_up_is_flat() -> None:
    assert drift("gateway", long_samples(HOUR_S, lambda at_s: 100 + min(at_s, 1200.0) / 10)) == []


def test_a_large_step_is_found_whatever_the_slope() -> None:
    found = drift("gateway", long_samples(60.0, lambda at_s: 100 if at_s < 40 else 140))
    assert found == [f"gateway: rss_bytes grew from {100 * MIB} to {140 * MIB}"]


def test_a_peak_does_not_move_the_slope() -> None:
    flat = long_samples(HOUR_S, lambda at_s: 900 if 3000 < at_s < 3100 else 100)
    assert rss_slope(flat) == 0
    assert rss_slope(long_samples(HOUR_S, lambda at_s: 100 + at_s / HOUR_S)) == pytest.approx(
        MIB, rel=1e-3
    )
