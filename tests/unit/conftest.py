"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.unit.examples import examples

PROFILE = "objectcache"
# How long an example takes is the machine's affair; pytest's own timeout ends what hangs.
settings.register_profile(
    PROFILE,
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(PROFILE)
