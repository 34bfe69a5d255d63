"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair; pytest's own timeout ends what hangs.
settings.register_profile(
    "objectcache", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("objectcache")
