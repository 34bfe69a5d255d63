"""Quotas of a store that several servers share: each judges by what all have stored, and gives out
its part.
"""

from __future__ import annotations

from contextlib import closing

import pytest

from objectcache_schemas.errors import StorageFull
from objectcache_schemas.messages.quotas import TakeRequests
from objectcache_schemas.records import BucketConfiguration, BucketInfo, Quota
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.engines.base import StagedPut
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.quotas.books import Books, StoreCompany
from objectcache_storage_server.quotas.take_requests import take_requests

LOGS = BucketInfo(name="logs", owner="root", region="", created_s=1.0)


def server_of(engine: MemoryEngine, serving: int) -> Books:
    """The books of one of several servers, as if the store in memory were shared."""
    return Books(engine, AccountBook(), StoreCompany(lambda: serving))


def put(books: Books, engine: MemoryEngine, key: str, size_bytes: int) -> None:
    with books.stored.reserving(engine.bucket("logs"), 1, size_bytes):
        staged = engine.stage("logs", key)
        staged.write_at(0, memoryview(bytes(size_bytes)))
        engine.commit([StagedPut(staged, "etag")])


def test_what_another_server_has_stored_counts() -> None:
    engine = MemoryEngine()
    engine.create_bucket(LOGS)
    engine.configure_bucket("logs", BucketConfiguration(quota=Quota(stored_bytes=100)))
    first, second = server_of(engine, 2), server_of(engine, 2)
    put(first, engine, "a", 60)
    with pytest.raises(StorageFull, match="would hold 120"):
        put(second, engine, "b", 60)
    put(second, engine, "b", 40)
    engine.delete("logs", ["a"])
    put(first, engine, "c", 60)


def test_buckets_that_another_server_makes_and_deletes_are_counted() -> None:
    engine = MemoryEngine()
    books = server_of(engine, 2)
    before = books.directory.buckets_version
    engine.create_bucket(LOGS)
    books.buckets_changed_elsewhere()
    assert books.stored.bucket_count("root") == 1
    assert books.directory.buckets_version != before
    assert books.directory.buckets_version == server_of(engine, 2).directory.buckets_version
    engine.delete_bucket("logs")
    books.buckets_changed_elsewhere()
    assert books.stored.bucket_count("root") == 0
    assert books.directory.buckets_version == before
    books.stored.bucket_created(LOGS)


@pytest.mark.asyncio
async def test_each_server_gives_out_its_part_of_the_requests() -> None:
    engine = MemoryEngine()
    engine.create_bucket(LOGS)
    engine.configure_bucket("logs", BucketConfiguration(quota=Quota(requests_per_s=8)))
    with closing(EngineCalls(engine)) as calls:
        taken = [
            await take_requests(
                server_of(engine, serving),
                calls,
                TakeRequests(identity="root", bucket="logs", wanted=100),
            )
            for serving in (1, 4)
        ]
    assert [one.granted for one in taken] == [8, 2]
