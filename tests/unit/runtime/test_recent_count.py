"""What happened lately: counted from its beginning until a minute without it has passed."""

from __future__ import annotations

from objectcache_runtime.metrics.recent_count import RECENT_S, RecentCount


def test_nothing_has_happened_at_the_start() -> None:
    assert RecentCount().at(0.0) == 0


def test_what_goes_on_is_counted_from_its_beginning_and_anew_after_a_pause() -> None:
    count = RecentCount()
    count.add(100.0)
    count.add(100.0 + 0.9 * RECENT_S, 2)
    assert count.at(100.0 + 1.8 * RECENT_S) == 3
    assert count.at(100.0 + 1.9 * RECENT_S) == 0
    count.add(100.0 + 3 * RECENT_S)
    assert count.at(100.0 + 3 * RECENT_S) == 1
