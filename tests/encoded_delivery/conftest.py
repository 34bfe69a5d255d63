"""One server with a prefix that is encoded in part, for all tests here that leave it so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.encoded_delivery.prefixes import client_of, fill
from tests.servers import RunningServer, start_server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = ("storage.nixl=trusting", "storage.compaction_bytes_per_s=0")  # as it was put
    with start_server(tmp_path_factory.mktemp("encoded"), *settings) as running:
        with client_of(running) as client:
            fill(running, client)
        yield running
