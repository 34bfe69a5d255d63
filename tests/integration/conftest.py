"""One running server for the integration tests that need no settings of their own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.s3_clients import close_clients, s3_client
from tests.servers import RunningServer, start_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A storage server with the default engine, and a gateway."""
    with start_server(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def closed_clients() -> Iterator[None]:
    """No test's client outlives its module: whatever test ran when its connections are collected
    would fail.
    """
    yield
    close_clients()


@pytest.fixture
def s3(server: RunningServer) -> Iterator[Any]:
    """A boto3 client with default settings, path style."""
    client = s3_client(server)
    yield client
    client.close()


@pytest.fixture
def bucket(s3: Any) -> str:
    """A bucket of the test's own."""
    name = f"test-{secrets.token_hex(6)}"
    s3.create_bucket(Bucket=name)
    return name
