"""A real server for the tests of engines, which run in an environment that has the engines.

`make test-engines` makes that environment and runs them. Elsewhere nothing here is collected, and
the report's header says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.servers import RunningServer, start_server

_HAS_ENGINES = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if _HAS_ENGINES else ["test_*.py", "*/test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Engines warn of what they use themselves, at their import; that is no error of ours."""
    if _HAS_ENGINES:
        for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{kind}")
        config.addinivalue_line("filterwarnings", "ignore:Unable to find acceptable character")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A storage server and a gateway on a data directory of their own."""
    with start_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running
