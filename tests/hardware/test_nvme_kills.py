"""SIGKILL at any moment of a store on a namespace, whose page cache the next process finds.

Runs where NVME_TEST_DEVICES names character devices, as `test_nvme_namespace.py` does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash import campaign
from tests.crash.fork_server import ForkServer
from tests.crash.settings import SEED, TIMES
from tests.crash.stores import NVME_KINDS
from tests.crash.workload import WRITES
from tests.hardware.nvme_namespaces import DEVICES, WHY_NOT

pytestmark = pytest.mark.skipif(not DEVICES, reason=WHY_NOT)
KILLS = 10
LONGEST_S = 2.0  # until a kill: an emulated machine is slow


def shows_enough(tally: campaign.Tally) -> bool:
    """Whether kills fell into operations, and extents were on both paths."""
    return (
        tally.unfinished > 0
        and set(tally.happened) == WRITES
        and tally.paths == {"page_cache", "direct"}
    )


@pytest.mark.parametrize("kind", NVME_KINDS)
def test_a_kill_at_any_moment_loses_and_tears_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    print(f"seed {SEED}")
    monkeypatch.setattr(campaign, "LONGEST_S", LONGEST_S)
    (tmp_path / "stores").mkdir()
    with ForkServer() as server:
        lives = campaign.Campaign(kind, tmp_path / "stores", tmp_path, SEED, server)
        tally = lives.run(KILLS * TIMES, shows_enough)
    print(tally)
    assert shows_enough(tally), tally
