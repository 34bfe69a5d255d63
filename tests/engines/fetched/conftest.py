"""Clients of these tests wait for a fetcher as long as a busy machine may make it slow."""

from __future__ import annotations

import pytest

from objectcache.routes import client_routes
from tests.engines.fetched.encoded_bucket import PATIENCE_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes over a fetcher does not come directly because that was slow once."""
    for name in ("RELAY_CALL_S", "SILENCE_S_MIN", "SILENCE_UNKNOWN_S"):
        monkeypatch.setattr(client_routes, name, PATIENCE_S)
