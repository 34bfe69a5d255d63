"""One pair of servers for all tests here: starting them takes longer than most of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.servers import Servers, served


@pytest.fixture(scope="package")
def servers() -> Iterator[Servers]:
    with served() as running:
        yield running
