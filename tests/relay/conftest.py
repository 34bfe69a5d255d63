"""A server with a prefix in it, and a relay of its deliveries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.relay.relays import RunningRelay, stocked_server
from tests.servers import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with stocked_server(tmp_path_factory.mktemp("relayed")) as running:
        yield running


@pytest.fixture(scope="module")
def relay(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningRelay]:
    log = tmp_path_factory.mktemp("relay") / "relay.log"
    with RunningRelay(server, log) as running:
        yield running
