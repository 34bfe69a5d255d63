"""What the gateway says at its start about file descriptors."""

from __future__ import annotations

import logging

import pytest

from objectcache_gateway.__main__ import OTHER_DESCRIPTORS, warn_of_descriptor_limit
from objectcache_schemas.settings import GatewaySettings


@pytest.mark.parametrize(("missing", "warnings"), [(0, 0), (1, 1)])
def test_a_limit_that_cannot_carry_the_connections_is_warned_of(
    caplog: pytest.LogCaptureFixture, missing: int, warnings: int
) -> None:
    gateway = GatewaySettings(connections_max=100, storage_connections_max=20)
    with caplog.at_level(logging.WARNING):
        warn_of_descriptor_limit(120 + OTHER_DESCRIPTORS - missing, gateway)
    assert len(caplog.records) == warnings
