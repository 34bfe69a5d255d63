"""A server with a prefix in it, and a fetcher of its deliveries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fetcher.fetchers import RunningFetcher
from tests.relay.relays import stocked_server
from tests.servers import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with stocked_server(tmp_path_factory.mktemp("fetched")) as running:
        yield running


@pytest.fixture(scope="module")
def fetcher(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningFetcher]:
    log = tmp_path_factory.mktemp("fetcher") / "fetcher.log"
    with RunningFetcher(server, log) as running:
        yield running
