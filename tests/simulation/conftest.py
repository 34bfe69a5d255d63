"""Property tests have the settings of the unit tests' here, too."""

from __future__ import annotations

from hypothesis import settings

from tests.unit import conftest as of_unit_tests

settings.load_profile(of_unit_tests.PROFILE)
