"""Whole lists, page after page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from objectcache_schemas.operators.admin_api import PAGE_ITEMS_MAX, BucketList, KeyList, UserList

if TYPE_CHECKING:
    from objectcache_operations.admin.api_client import ApiClient
    from objectcache_schemas.operators.admin_api import BucketView, KeyView, UserView


def every_user(client: ApiClient) -> list[UserView]:
    """All users by name."""
    found: list[UserView] = []
    after: str | None = ""
    while after is not None:
        page = client.get("/v1/users", UserList, after=after, limit=PAGE_ITEMS_MAX)
        found += page.users
        after = page.next_after
    return found


def every_key(client: ApiClient, user: str | None = None) -> list[KeyView]:
    """All keys, or a user's."""
    found: list[KeyView] = []
    after: str | None = ""
    while after is not None:
        page = client.get("/v1/keys", KeyList, user=user, after=after, limit=PAGE_ITEMS_MAX)
        found += page.keys
        after = page.next_after
    return found


def every_bucket(client: ApiClient, owner: str | None = None) -> list[BucketView]:
    """All buckets, or a user's."""
    found: list[BucketView] = []
    after: str | None = ""
    while after is not None:
        page = client.get("/v1/buckets", BucketList, owner=owner, after=after, limit=PAGE_ITEMS_MAX)
        found += page.buckets
        after = page.next_after
    return found
