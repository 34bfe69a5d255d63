"""A short form of the soak: the servers do everything at once and stay flat."""

from __future__ import annotations

from pathlib import Path

from tests.soak.run import soak

SECONDS = 20.0


def test_under_mixed_load_every_byte_is_right_and_the_servers_stay_flat(tmp_path: Path) -> None:
    outcome = soak(tmp_path / "data", SECONDS, SECONDS / 60)
    assert outcome.wrong == []
    assert outcome.done["deliveries"] > 0
    assert outcome.done["abandon"] > 0
    assert outcome.done["end_late"] > 0
    assert outcome.done["scrapes"] > 0
    assert outcome.evicted_chunks > 0
    assert set(outcome.samples) == {
        "objectcache_gateway",
        "objectcache_gateway.admin",
        "objectcache_storage_server",
    }
