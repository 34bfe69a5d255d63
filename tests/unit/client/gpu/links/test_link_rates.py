"""What is learned of a link's rate, how it ages, and that a link which was slow is tried again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache.gpu.links.link_pulls import LinkPulls
from objectcache.gpu.links.link_rates import LinkRates
from objectcache.gpu.links.pull_settings import OURS
from tests.unit.client.gpu.links.test_link_pulls import gpu_links, run_of
from tests.unit.examples import examples

FIRST, KNOWN = 1000.0, 400.0
RATE = st.floats(1.0, 1e12)


def learned(rates: LinkRates, rate: float, now_s: float = 0.0) -> None:
    rates.learn(0, 0, 100, 100 / rate, now_s)


@settings(max_examples=examples(60))
@given(RATE, st.booleans(), st.lists(st.floats(0.0, 1e5), min_size=2, max_size=5))
def test_what_was_learned_comes_ever_nearer_to_what_is_known(
    rate: float, is_known: bool, ages_s: list[float]
) -> None:
    rates = LinkRates(FIRST, {(0, 0): KNOWN} if is_known else None)
    base = KNOWN if is_known else FIRST
    for _ in range(40):
        learned(rates, rate)
    seen = [rates.bytes_per_s(0, 0, age_s) for age_s in sorted(ages_s)]
    away = [abs(1 / each - 1 / base) for each in seen]
    assert all(b <= a * (1 + 1e-9) + 1e-12 for a, b in pairwise(away))
    low, high = sorted((rate, base))
    assert all(0.98 * low <= each <= 1.02 * high for each in seen)
    assert rates.bytes_per_s(0, 0, 1e6) == pytest.approx(base)


def test_half_of_it_is_left_after_ten_seconds() -> None:
    rates = LinkRates(1.0)
    learned(rates, 0.5)  # 2 s a byte, where 1 is taken for it at first
    assert rates.bytes_per_s(0, 0, 0.0) == pytest.approx(1 / 2)
    assert rates.bytes_per_s(0, 0, 10.0) == pytest.approx(1 / 1.5)
    assert rates.bytes_per_s(0, 0, 20.0) == pytest.approx(1 / 1.25)


def test_the_first_micro_task_says_all_of_an_unknown_link_and_little_of_a_known_one() -> None:
    unknown, known = LinkRates(FIRST), LinkRates(FIRST, {(0, 0): KNOWN})
    for rates in (unknown, known):
        learned(rates, 100.0)
    assert unknown.bytes_per_s(0, 0, 0.0) == pytest.approx(100.0)
    assert known.bytes_per_s(0, 0, 0.0) == pytest.approx(8 / (1 / 100.0 + 7 / KNOWN))
    learned(unknown, 50.0, 1000.0)  # what was learned is as good as forgotten
    assert unknown.bytes_per_s(0, 0, 1000.0) == pytest.approx(50.0)


def test_a_link_that_was_slow_is_tried_again_after_a_while() -> None:
    rates = LinkRates(FIRST)
    rates.learn(1, 0, 10, 1.0, 0.0)  # a hundredth of the first rate
    taken = {}
    for now_s in (0.0, 100.0):
        pulls = LinkPulls(gpu_links(2), replace(OURS, chunk_bytes=10, fallback_bytes=0), rates)
        pulls.begin(0, run_of(40))
        taken[now_s] = pulls.pull(1, now_s) is not None
    assert taken == {0.0: False, 100.0: True}
