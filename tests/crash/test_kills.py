"""SIGKILL at any moment loses nothing that was acknowledged and shows nothing torn.

CRASH_TEST_TIMES=10 does so ten times as often; CRASH_TEST_SEED repeats a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, StoreFailed
from tests.crash.fork_server import ForkServer
from tests.crash.settings import SEED, TIMES
from tests.crash.stores import STORE_KINDS
from tests.crash.worker import Sabotage

KILLS = {"files": 30, "local": 100, "local-full": 60, "local-threads": 40}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


def campaign(
    kind: str, tmp_path: Path, server: ForkServer, sabotage: Sabotage = Sabotage.NONE
) -> Campaign:
    print(f"seed {SEED}")
    (tmp_path / "stores").mkdir()
    return Campaign(kind, tmp_path / "stores", tmp_path, SEED, server, sabotage=sabotage)


@pytest.mark.timeout(60 + 60 * TIMES)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_a_kill_at_any_moment_loses_and_tears_nothing(
    tmp_path: Path, server: ForkServer, kind: str
) -> None:
    tally = campaign(kind, tmp_path, server).run(KILLS[kind] * TIMES)
    print(tally)
    assert tally.unfinished > 0, "no kill fell into an operation"
    assert set(tally.happened) == {"Put", "PutPrefix", "Delete"}
    assert kind == "files" or tally.compacted > 0
    assert kind != "local" or tally.paths == {"page_cache", "direct"}
    assert kind != "local-full" or tally.evicted > 0


def test_an_engine_that_acknowledges_too_early_is_found_out(
    tmp_path: Path, server: ForkServer
) -> None:
    with pytest.raises(StoreFailed, match="possible are"):
        campaign("files", tmp_path, server, Sabotage.EARLY).run(50)
