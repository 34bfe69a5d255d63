"""The arithmetic of the benchmark of engines on one link."""

from __future__ import annotations

import pytest

from benchmarks.shared_link.requests import CAP_GBPS, FULL, QUICK, SCALE
from benchmarks.shared_link.results import Results, Round, table

ALONE = {"short": 1.0, "long": 4.0}


def results() -> Results:
    rounds = [
        Round("dynamic", {"short": short, "long": long}, own_windows=2)
        for short, long in ((1.1, 4.5), (1.2, 4.2), (1.1, 9.0))
    ]
    rounds += [
        Round("equal", {"short": short, "long": long}, own_windows=1)
        for short, long in ((2.0, 4.2), (3.0, 4.4), (2.5, 4.0))
    ]
    return Results(ALONE, tuple(rounds))


def test_what_others_cost_is_the_median_of_the_rounds() -> None:
    one = results()
    assert one.policies() == ["dynamic", "equal"]
    assert one.added_s("dynamic", "short") == pytest.approx(0.1)
    assert one.added_s("equal", "long") == pytest.approx(0.2)
    assert one.totals_s("dynamic") == pytest.approx([0.6, 0.4, 5.1])
    assert one.ratio("dynamic", "equal") == pytest.approx(0.6 / 1.5)
    assert one.own_windows() == (9, 12)


def test_the_table_has_every_request_and_the_ratio() -> None:
    shown = table(results(), "dynamic", ["equal"])
    assert "| short | 1,000 | 100 | 1,500 |" in shown
    assert "| **all together** | | 600 (400 to 5,100) | 1,500 (1,200 to 2,400) |" in shown
    assert "9 of 12 deliveries had a window of the engine's own." in shown
    assert "dynamic / equal: 0.40" in shown


def test_the_requests_are_the_papers_with_their_bytes_divided_like_the_cap() -> None:
    assert [request.name for request in FULL] == [
        "16K, 50%", "16K, 87.5%", "32K, 50%", "32K, 87.5%", "64K, 87.5%",
    ]  # fmt: skip
    block_bytes = 4096  # of 16 tokens and a layer, in the engine
    for request in (*FULL, *QUICK):
        assert request.cached_tokens % 16 == 0
        paper_cached = 4 * request.cached_tokens
        assert request.cached_tokens // 16 * block_bytes * SCALE == paper_cached * 4096
    assert pytest.approx(50.0 / SCALE) == CAP_GBPS
