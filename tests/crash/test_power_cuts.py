"""A power cut loses nothing that was acknowledged durably, and shows nothing torn.

The store lies on a file system that forgets a random part of what was not flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.campaign import Campaign, StoreFailed, Tally
from tests.crash.fork_server import ForkServer
from tests.crash.lossy_fs import LossyMount, lossy_mount, reason_to_skip
from tests.crash.settings import SEED, TIMES
from tests.crash.worker import Sabotage
from tests.crash.workload import WRITES

pytestmark = [
    pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
    pytest.mark.timeout(600 * TIMES),
]
CUTS = {"files": 12, "local": 30, "local-full": 12, "local-encoded": 10, "local-full-fickle": 10}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as started:
        yield started


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[LossyMount]:
    folder = tmp_path / "stores"
    folder.mkdir()
    with lossy_mount(folder) as mounted:
        yield mounted


def campaign(
    kind: str,
    mount: LossyMount,
    server: ForkServer,
    *,
    has_async: bool = False,
    sabotage: Sabotage = Sabotage.NONE,
) -> Campaign:
    print(f"seed {SEED}")
    return Campaign(
        kind,
        mount.folder,
        mount.folder.parent,
        SEED,
        server,
        has_async=has_async,
        sabotage=sabotage,
        cut=mount.cut,
    )


def shows_enough(tally: Tally) -> bool:
    """Whether cuts fell into an operation, and every kind of it was done."""
    return tally.unfinished > 0 and set(tally.happened) == WRITES


@pytest.mark.parametrize("kind", CUTS)
def test_a_power_cut_loses_and_tears_nothing(
    mount: LossyMount, server: ForkServer, kind: str
) -> None:
    tally = campaign(kind, mount, server).run(CUTS[kind] * TIMES, shows_enough)
    print(tally)
    assert shows_enough(tally), tally


def test_asynchronous_buckets_lose_only_what_is_recent_and_show_nothing_torn(
    mount: LossyMount, server: ForkServer
) -> None:
    print(campaign("local", mount, server, has_async=True).run(15 * TIMES))


@pytest.mark.parametrize("kind", ["files", "local"])
def test_an_engine_that_does_not_flush_is_found_out(
    mount: LossyMount, server: ForkServer, kind: str
) -> None:
    with pytest.raises(StoreFailed):
        campaign(kind, mount, server, sabotage=Sabotage.NO_FSYNC).run(500)
