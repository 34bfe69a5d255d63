"""What a token of the admin API may do. Pure.

A scope is `admin`, `read`, or a resource with an access, such as `users:read` or `users:write`.
Writing covers reading of the same resource; `read` covers reading of all; `admin` covers all.
"""

from __future__ import annotations

from collections.abc import Iterable

from objectcache_schemas.operators.admin_api import READ, SCOPE_ADMIN, SCOPE_READ, WRITE

ANY = ""  # whoever has credentials may


def covers(scopes: Iterable[str], needed: str) -> bool:
    """Whether one of the scopes allows what `needed` names."""
    allowed = {SCOPE_ADMIN, needed}
    resource, _, access = needed.partition(":")
    if access == READ:
        allowed |= {SCOPE_READ, f"{resource}:{WRITE}"}
    held = set(scopes)
    return bool(held) if needed == ANY else not allowed.isdisjoint(held)


def uncovered(scopes: Iterable[str], wanted: Iterable[str]) -> str | None:
    """The first of the wanted scopes that these do not cover; None where all are."""
    held = tuple(scopes)
    return next((scope for scope in wanted if not covers(held, scope)), None)
