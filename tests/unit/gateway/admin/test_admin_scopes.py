"""What a token of the admin API may do."""

from __future__ import annotations

import pytest

from objectcache_gateway.admin.api import ROUTES
from objectcache_gateway.admin.serving.scopes import ANY, covers, uncovered
from objectcache_schemas.operators.admin_api import SCOPES


@pytest.mark.parametrize(
    ("scopes", "needed", "is_covered"),
    [
        (("admin",), "users:write", True),
        (("admin",), "admin", True),
        (("read",), "users:read", True),
        (("read",), "users:write", False),
        (("read",), "admin", False),
        (("users:write",), "users:read", True),
        (("users:write",), "users:write", True),
        (("users:read",), "users:write", False),
        (("users:write",), "keys:read", False),
        (("keys:read", "users:read"), "users:read", True),
        (("users:read",), "admin", False),
        ((), "users:read", False),
        ((), ANY, False),
        (("metrics:read",), ANY, True),
    ],
)
def test_a_scope_covers_what_it_names_and_what_that_includes(
    scopes: tuple[str, ...], needed: str, is_covered: bool
) -> None:
    assert covers(scopes, needed) is is_covered


def test_the_first_scope_that_is_not_held_is_named() -> None:
    assert uncovered(("users:write",), ("users:read", "keys:read", "admin")) == "keys:read"
    assert uncovered(("admin",), SCOPES) is None
    assert uncovered(("read",), ("read",)) is None


def test_every_route_but_liveness_needs_a_scope_that_tokens_can_have() -> None:
    open_to_all = [route.path for route in ROUTES if route.scope is None]
    assert open_to_all == ["/healthz"]
    for route in ROUTES:
        assert route.scope in (None, ANY, *SCOPES), route


def test_nothing_that_changes_is_open_to_a_reading_scope() -> None:
    for route in ROUTES:
        if route.changes:
            assert route.scope is not None
            assert not covers(("read",), route.scope), route
