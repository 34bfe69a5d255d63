"""SIGKILL at any moment loses nothing that was acknowledged and shows nothing torn.

CRASH_TEST_TIMES=10 does so ten times as often; CRASH_TEST_SEED repeats a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, StoreFailed, Tally
from tests.crash.fork_server import ForkServer
from tests.crash.settings import SEED, TIMES
from tests.crash.worker import Sabotage
from tests.crash.workload import WRITES

KILLS = {
    "files": 25,
    "local": 60,
    "local-full": 40,
    "local-encoded": 30,
    "local-full-fickle": 20,
    "local-threads": 30,
}


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


def shows_enough(kind: str, tally: Tally) -> bool:
    """Whether kills fell into everything that an engine of this kind does."""
    return (
        tally.unfinished > 0
        and set(tally.happened) == WRITES
        and (kind == "files" or tally.compacted > 0)
        and (kind != "local" or tally.paths == {"page_cache", "direct"})
        and ("full" not in kind or tally.evicted > 0)
        and ("fickle" not in kind or tally.reencoded > 0)
    )


@pytest.mark.timeout(600 * TIMES)
@pytest.mark.parametrize("kind", KILLS)
def test_a_kill_at_any_moment_loses_and_tears_nothing(
    tmp_path: Path, server: ForkServer, kind: str
) -> None:
    tally = campaign(kind, tmp_path, server).run(KILLS[kind] * TIMES, partial(shows_enough, kind))
    print(tally)
    assert shows_enough(kind, tally), tally


def test_an_engine_that_acknowledges_too_early_is_found_out(
    tmp_path: Path, server: ForkServer
) -> None:
    with pytest.raises(StoreFailed, match="possible are"):
        campaign("files", tmp_path, server, Sabotage.EARLY).run(500)
