"""What a server says that it has moved lately."""

from __future__ import annotations

import math

import pytest

from objectcache_storage_server.admission.recent_bytes import FADES_S, RecentBytes


def test_what_began_counts_for_less_as_it_is_longer_ago() -> None:
    recent = RecentBytes()
    assert recent.at(5.0) == (0, 0.0)
    recent.add(1_000_000, 5.0)
    recent.add(500_000, 5.0 + FADES_S)
    size_bytes, requests = recent.at(5.0 + FADES_S)
    assert size_bytes == pytest.approx(1_000_000 / math.e + 500_000, abs=1)
    assert requests == pytest.approx(1 / math.e + 1)
    assert recent.at(5.0 + 20 * FADES_S)[0] == 0
