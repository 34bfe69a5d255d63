"""One service for the tests that leave nothing behind; others start their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dispatch_service.running import DispatchProcess

Start = Callable[..., DispatchProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts services with these settings, and ends them with the test."""
    running: list[DispatchProcess] = []

    def begin(*assignments: str, listen: str = "127.0.0.1:0") -> DispatchProcess:
        running.append(DispatchProcess(tmp_path, *assignments, listen=listen))
        return running[-1]

    yield begin
    for service in running:
        if service.process.returncode is None:
            assert service.process.terminate() == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DispatchProcess]:
    """For tests that are refused whatever they ask."""
    service = DispatchProcess(tmp_path_factory.mktemp("shared"))
    yield service
    assert service.process.terminate() == 0
