"""A real server for the tests of engines, which run in an environment that has the engines.

`make test-engines` makes that environment and runs them. Elsewhere nothing here is collected, and
the report's header says so.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.servers import RunningServer, start_server

_HAS_ENGINES = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if _HAS_ENGINES else ["test_*.py", "*/test_*.py"]
TIMEOUT_S = 600.0  # of a test: an engine's first start alone takes a busy machine minutes


def pytest_configure(config: pytest.Config) -> None:
    """Engines warn of what they use themselves, at their import; that is no error of ours.

    A model computes in one thread: several wait for each other, which on a busy machine takes them
    a hundred times as long.
    """
    if _HAS_ENGINES:
        os.environ["OMP_NUM_THREADS"] = "1"
        for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{kind}")
        config.addinivalue_line("filterwarnings", "ignore:Unable to find acceptable character")


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Bound these tests, and no others of a run, by TIMEOUT_S."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A storage server and a gateway on a data directory of their own."""
    with start_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running
