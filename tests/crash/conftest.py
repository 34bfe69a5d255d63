"""What the stores of these tests change in this process ends with each test; property tests have
the settings of the unit tests'.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.crash.stores import SHORT_WAITS
from tests.unit import conftest as of_unit_tests

settings.load_profile(of_unit_tests.PROFILE)


@pytest.fixture(autouse=True)
def own_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upkeep has its waits again when a test has ended."""
    for module, name, _ in SHORT_WAITS:
        monkeypatch.setattr(module, name, getattr(module, name))
