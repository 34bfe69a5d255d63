"""A server with a prefix in it, and two relays of its deliveries, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.relay.relays import RunningRelay, stocked_server
from tests.servers import RunningServer


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
