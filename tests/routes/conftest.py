"""A server with a prefix in it, and two relays of its deliveries, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from objectcache.routes import dispatch_client
from tests.relay.relays import RunningRelay, stocked_server
from tests.servers import RunningServer


@pytest.fixture
def patient_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatch service may take longer to answer than deliveries else wait for it."""
    monkeypatch.setattr(dispatch_client, "ROUTE_ANSWER_S", 5.0)
    monkeypatch.setattr(dispatch_client, "ANSWER_S", 20.0)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with stocked_server(tmp_path_factory.mktemp("routed")) as running:
        yield running


@pytest.fixture(scope="package")
def relays(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningRelay, RunningRelay]]:
    folder = tmp_path_factory.mktemp("relays")
    with (
        RunningRelay(server, folder / "b.log") as b,
        RunningRelay(server, folder / "c.log") as c,
    ):
        yield b, c
