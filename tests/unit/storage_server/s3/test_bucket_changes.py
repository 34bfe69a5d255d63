"""A change of a bucket is answered once gateways, which keep what they know of it, have heard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar, cast

import pytest

from objectcache_schemas.errors import Conflict
from objectcache_schemas.messages.handshake import Done
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.directory import AccountDirectory, Known
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.quotas.books import Books
from objectcache_storage_server.s3 import bucket_requests
from objectcache_storage_server.s3.bucket_requests import BucketMeans, change_bucket

T = TypeVar("T")
LONG_S = 60.0


class Calls:
    """Makes each call at once."""

    async def call(self, function: Callable[[], T]) -> T:
        """What the function returns."""
        return function()


class Gateway:
    """Whoever follows, as an object that can be forgotten."""


class Followed:
    """A directory that one gateway follows, which has heard of all until now."""

    def __init__(self) -> None:
        self.directory = AccountDirectory(AccountBook())
        books = cast(Books, SimpleNamespace(directory=self.directory))
        self.means = BucketMeans(cast(EngineCalls, Calls()), books, buckets_per_user_max=1)
        self._gateway = Gateway()
        self.hears()

    def hears(self) -> None:
        self.directory.follows(self._gateway, Known(1, self.directory.buckets_version))


@pytest.mark.asyncio
async def test_a_change_is_answered_when_a_gateway_has_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket_requests, "FOLLOWED_TIMEOUT_S", LONG_S)
    followed, made = Followed(), []
    changing = asyncio.create_task(change_bucket(followed.means, lambda: made.append(1)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert made == [1]
    assert not changing.done()
    followed.hears()
    assert await changing == Done()


@pytest.mark.asyncio
async def test_gateways_are_told_of_a_change_that_failed_too_as_it_may_be_half_made() -> None:
    followed = Followed()
    before = followed.directory.buckets_version

    def fail() -> None:
        raise Conflict("halfway")

    with pytest.raises(Conflict):
        await change_bucket(followed.means, fail)
    assert followed.directory.buckets_version != before
