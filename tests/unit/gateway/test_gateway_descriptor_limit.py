"""What the gateway makes of the file descriptors that it may have."""

from __future__ import annotations

import logging
import sys

import pytest

from objectcache_gateway.__main__ import OTHER_DESCRIPTORS, connections_that_fit
from objectcache_runtime.settings import GatewaySettings, Settings, StorageSettings

SETTINGS = Settings(
    gateway=GatewaySettings(connections_max=100, storage_connections_max=20),
    storage=StorageSettings(sessions_max=10),
)
ENOUGH = 100 + 20 + 10 + OTHER_DESCRIPTORS


@pytest.mark.parametrize(
    ("descriptors_max", "fitting", "warnings"),
    [
        (sys.maxsize, 100, 0),
        (ENOUGH, 100, 0),
        (ENOUGH - 1, 99, 1),
        (ENOUGH - 90, 26, 1),  # a quarter at least
    ],
)
def test_connections_that_descriptors_do_not_suffice_for_are_not_allowed_and_warned_of(
    caplog: pytest.LogCaptureFixture, descriptors_max: int, fitting: int, warnings: int
) -> None:
    with caplog.at_level(logging.WARNING):
        assert connections_that_fit(descriptors_max, SETTINGS) == fitting
    assert len(caplog.records) == warnings
