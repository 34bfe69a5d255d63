"""A short form of the soak: the servers do everything at once and stay flat."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.run import Outcome, soak

SECONDS = 10.0
LONGER_S = 60.0  # where a busy machine did too little in that, or still warmed up
GREW = " grew from "  # as threads do until their pools are full
EXPECTED = ("deliveries", "abandon", "end_late", "scrapes")


def has_done_everything(outcome: Outcome) -> bool:
    return all(outcome.done[what] > 0 for what in EXPECTED) and outcome.evicted_chunks > 0


@pytest.mark.timeout(600)
def test_under_mixed_load_every_byte_is_right_and_the_servers_stay_flat(tmp_path: Path) -> None:
    outcome = soak(tmp_path / "data", SECONDS, SECONDS / 60)
    assert [words for words in outcome.wrong if GREW not in words] == []
    if outcome.wrong or not has_done_everything(outcome):
        outcome = soak(tmp_path / "longer", LONGER_S, LONGER_S / 60)
    assert outcome.wrong == []
    assert has_done_everything(outcome), outcome
    assert set(outcome.samples) == {
        "objectcache_gateway",
        "objectcache_gateway.admin",
        "objectcache_storage_server",
    }
