"""Which requests are let through, how often the storage server is asked, what a denial tells."""

from __future__ import annotations

import asyncio

import pytest

from objectcache_gateway.access.authorizer import Authorizer
from objectcache_gateway.access.bucket_cache import BUCKETS_MAX, BYTES_MAX, BucketCache
from objectcache_gateway.access.directory import AccessDirectory, DirectorySource
from objectcache_gateway.access.permissions import ROOT, Caller
from objectcache_gateway.request.addressing import Address
from objectcache_gateway.request.routes import Operation
from objectcache_schemas.accounts import Access, Grant
from objectcache_schemas.errors import AccessDenied, NotFound, ObjectCacheError
from objectcache_schemas.messages.buckets import Bucket, GetBucket
from objectcache_schemas.records import BucketConfiguration, BucketInfo, LifecycleRule

ALICE = Caller("alice", may_create_buckets=True)
BOB = Caller("bob", may_create_buckets=True)
CAROL = Caller("carol")
LOGS = Address("logs", "a/1")


class FollowedDirectory(AccessDirectory):
    """A directory that a test says things to."""

    def __init__(self) -> None:
        super().__init__(self._no_connection)
        self.is_broken = False

    async def _no_connection(self) -> DirectorySource:
        raise AssertionError("nobody follows")

    @property
    def is_followed(self) -> bool:
        return not self.is_broken

    @property
    def versions(self) -> tuple[int, int] | None:
        return None if self.is_broken else (0, 0)

    def buckets_changed(self) -> None:
        """As when the storage server says so."""
        self._tell_buckets()


class Buckets:
    """The storage server's buckets, by name and owner."""

    def __init__(self, **owners: str) -> None:
        self.owners = owners
        self.created_s = 1.0
        self.asked: list[str] = []
        self.was_asked = asyncio.Event()
        self.directory = FollowedDirectory()
        self.held_back: asyncio.Event | None = None
        self.version = 0  # under which the server that is asked answers
        self.authorizer = Authorizer(BucketCache(self.ask, self.directory))

    async def ask(self, request: GetBucket) -> Bucket:
        self.asked.append(request.name)
        self.was_asked.set()
        owner = self.owners.get(request.name)
        if self.held_back is not None:
            await self.held_back.wait()
        if owner is None:
            raise NotFound("no such bucket", code="NoSuchBucket")
        info = BucketInfo(name=request.name, owner=owner, region="", created_s=self.created_s)
        return Bucket(info=info, buckets_version=self.version)

    async def outcome(
        self,
        caller: Caller,
        operation: Operation = Operation.GET_OBJECT,
        address: Address = LOGS,
        **query: str,
    ) -> str:
        """The error's code, or what the bucket's owner is called."""
        try:
            access = await self.authorizer.authorize(caller, operation, address, query)
        except ObjectCacheError as error:
            return error.code
        return access.bucket.owner if access.bucket else ""


@pytest.mark.asyncio
async def test_what_a_server_answers_under_another_version_is_not_kept() -> None:
    buckets = Buckets(logs="alice")
    buckets.version = 7  # the directory is followed at a server that has replayed more, or less
    for _ in range(2):
        assert await buckets.outcome(ALICE) == "alice"
    assert buckets.asked == ["logs", "logs"]
    buckets.owners["logs"] = "bob"
    assert await buckets.outcome(ALICE) == "AccessDenied"
    buckets.version = 0
    for _ in range(2):
        assert await buckets.outcome(BOB) == "bob"
    assert buckets.asked == ["logs"] * 4


@pytest.mark.asyncio
async def test_an_owner_is_looked_up_once_until_a_bucket_changes() -> None:
    buckets = Buckets(logs="alice", kv="bob")
    for _ in range(3):
        assert await buckets.outcome(ALICE) == "alice"
    assert buckets.asked == ["logs"]
    buckets.directory.buckets_changed()
    assert await buckets.outcome(ALICE) == "alice"
    assert buckets.asked == ["logs", "logs"]


@pytest.mark.asyncio
async def test_while_changes_would_not_be_heard_of_every_request_asks() -> None:
    buckets = Buckets(logs="alice")
    assert await buckets.outcome(ALICE) == "alice"
    buckets.directory.is_broken = True
    for _ in range(2):
        assert await buckets.outcome(ALICE) == "alice"
    assert len(buckets.asked) == 3


@pytest.mark.asyncio
async def test_an_answer_from_before_a_change_is_not_kept() -> None:
    buckets = Buckets(logs="alice")
    buckets.held_back = asyncio.Event()
    asking = asyncio.create_task(buckets.outcome(ALICE))
    await buckets.was_asked.wait()
    buckets.owners["logs"] = "bob"
    buckets.directory.buckets_changed()
    buckets.held_back.set()
    await asking
    assert await buckets.outcome(BOB) == "bob"
    assert await buckets.outcome(ALICE) == "AccessDenied"


@pytest.mark.asyncio
async def test_nobody_is_refused_by_what_may_be_outdated() -> None:
    buckets = Buckets(logs="alice")
    assert await buckets.outcome(ALICE) == "alice"
    buckets.owners["logs"] = "bob"  # the news is on its way
    assert await buckets.outcome(BOB) == "bob"


@pytest.mark.asyncio
async def test_a_denial_asks_as_often_as_a_bucket_that_is_not_there() -> None:
    buckets = Buckets(logs="alice")
    assert await buckets.outcome(ALICE) == "alice"
    for address in (LOGS, Address("gone", "a/1")):
        buckets.asked.clear()
        assert await buckets.outcome(CAROL, address=address) == "AccessDenied"
        assert len(buckets.asked) == 1


@pytest.mark.asyncio
async def test_whom_a_bucket_cannot_concern_is_denied_without_a_question() -> None:
    scope = (Grant(bucket="kv", access=(Access.READ,)),)
    narrowed = Caller("alice", may_create_buckets=True, scope=scope)
    buckets = Buckets(logs="alice")
    for name in ("logs", "gone"):
        assert await buckets.outcome(narrowed, address=Address(name)) == "AccessDenied"
    assert not buckets.asked


@pytest.mark.asyncio
async def test_a_missing_bucket_is_told_to_those_who_may_know() -> None:
    buckets = Buckets()
    assert await buckets.outcome(ALICE) == "NoSuchBucket"
    assert await buckets.outcome(ROOT) == "NoSuchBucket"
    assert await buckets.outcome(CAROL) == "AccessDenied"
    granted = Caller("carol", grants=(Grant(bucket="logs", access=(Access.READ,)),))
    assert await buckets.outcome(granted) == "NoSuchBucket"


@pytest.mark.asyncio
async def test_a_grant_is_worth_nothing_on_a_later_bucket_of_the_same_name() -> None:
    buckets = Buckets(logs="alice")
    grant = Grant(bucket="logs", access=(Access.READ,), bucket_created_s=1.0)
    reader = Caller("carol", grants=(grant,))
    assert await buckets.outcome(reader) == "alice"
    buckets.created_s = 2.0
    buckets.directory.buckets_changed()
    assert await buckets.outcome(reader) == "AccessDenied"


@pytest.mark.asyncio
async def test_a_bucket_is_made_without_being_looked_up() -> None:
    buckets = Buckets(logs="bob")
    create = Operation.CREATE_BUCKET
    assert await buckets.outcome(ALICE, create, Address("logs")) == ""
    assert await buckets.outcome(CAROL, create, Address("logs")) == "AccessDenied"
    assert await buckets.outcome(CAROL, create, Address("gone")) == "AccessDenied"
    assert not buckets.asked


@pytest.mark.asyncio
async def test_a_listing_is_judged_by_its_prefix_and_a_key_by_itself() -> None:
    grants = (Grant(bucket="logs", access=(Access.READ,), prefix="a/", bucket_created_s=1.0),)
    buckets, reader = Buckets(logs="alice"), Caller("carol", grants=grants)
    listing, bucket = Operation.LIST_OBJECTS_V2, Address("logs")
    assert await buckets.outcome(reader, listing, bucket, prefix="a/b") == "alice"
    assert await buckets.outcome(reader, listing, bucket, prefix="b") == "AccessDenied"
    assert await buckets.outcome(reader, listing, bucket) == "AccessDenied"
    assert await buckets.outcome(reader, address=Address("logs", "b/1")) == "AccessDenied"
    assert await buckets.outcome(reader, Operation.KV_GET, bucket) == "alice"
    assert await buckets.outcome(reader, Operation.KV_PUT, bucket) == "AccessDenied"
    assert await buckets.outcome(reader, Operation.HEAD_BUCKET, bucket) == "alice"
    assert await buckets.outcome(reader, Operation.GET_BUCKET_ACL, bucket) == "AccessDenied"


@pytest.mark.asyncio
async def test_what_is_in_another_bucket_is_judged_there() -> None:
    buckets = Buckets(logs="alice", kv="bob")
    access = await buckets.authorizer.authorize(ALICE, Operation.COPY_OBJECT, LOGS, {})
    assert access.here.owner == "alice"
    with pytest.raises(AccessDenied):
        await access.check_elsewhere(Access.READ, "kv", "a/1")
    buckets.owners["kv"] = "alice"
    await access.check_elsewhere(Access.READ, "kv", "a/1")


@pytest.mark.asyncio
async def test_what_is_remembered_of_buckets_is_bounded() -> None:
    buckets = Buckets()
    cache = BucketCache(buckets.ask, buckets.directory)
    for index in range(BUCKETS_MAX + 5):
        buckets.owners[f"bucket-{index}"] = "alice"
        await cache.ask(f"bucket-{index}")
    assert repr(cache).startswith(f"<BucketCache 5/{BUCKETS_MAX}, ")


@pytest.mark.asyncio
async def test_what_is_remembered_of_buckets_is_bounded_in_bytes_too() -> None:
    rule = LifecycleRule(rule_id="r", prefix="p" * (BYTES_MAX // 4), expiration_days=1)
    configuration = BucketConfiguration(lifecycle=(rule,))

    async def ask(request: GetBucket) -> Bucket:
        info = BucketInfo(
            name=request.name,
            owner="alice",
            region="r",
            created_s=1.0,
            configuration=configuration,
        )
        return Bucket(info=info)

    cache = BucketCache(ask, FollowedDirectory())
    for name in ("one", "two", "one", "three", "one"):
        await cache.ask(name)
    assert [name for name in ("one", "two", "three") if cache.known(name)] == [
        "one",
        "two",
        "three",
    ]
    await cache.ask("four")
    assert [name for name in ("one", "two", "three", "four") if cache.known(name)] == ["four"]
