"""What the stores of these tests change in this process ends with each test."""

from __future__ import annotations

import pytest

from tests.crash.stores import SHORT_WAITS


@pytest.fixture(autouse=True)
def own_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upkeep has its waits again when a test has ended."""
    for module, name, _ in SHORT_WAITS:
        monkeypatch.setattr(module, name, getattr(module, name))
