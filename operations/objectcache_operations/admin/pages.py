"""Whole lists, page after page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from objectcache_schemas.operators.admin_api import PAGE_ITEMS_MAX, BucketList, KeyList, UserList

if TYPE_CHECKING:
    from objectcache_operations.admin.api_client import ApiClient
    from objectcache_schemas.operators.admin_api import BucketView, KeyView, UserView

P = TypeVar("P", UserList, KeyList, BucketList)


def every_user(client: ApiClient) -> list[UserView]:
    """All users by name."""
    return [user for page in _pages(client, "/v1/users", UserList) for user in page.users]


def every_key(client: ApiClient, user: str | None = None) -> list[KeyView]:
    """All keys, or a user's."""
    return [key for page in _pages(client, "/v1/keys", KeyList, user=user) for key in page.keys]


def every_bucket(client: ApiClient, owner: str | None = None) -> list[BucketView]:
    """All buckets, or a user's."""
    pages = _pages(client, "/v1/buckets", BucketList, owner=owner)
    return [bucket for page in pages for bucket in page.buckets]


def _pages(client: ApiClient, path: str, page_type: type[P], **query: str | None) -> Iterator[P]:
    after: str | None = ""
    while after is not None:
        page = client.get(path, page_type, after=after, limit=PAGE_ITEMS_MAX, **query)
        yield page
        after = page.next_after
