"""Bytes and deliveries in flight: counted for the tenant and the bucket, and given back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from objectcache_schemas.accounts import PutUser, User
from objectcache_schemas.errors import Busy, StorageFull
from objectcache_schemas.messages.quotas import TenantActivity
from objectcache_schemas.records import BucketConfiguration, BucketInfo, Quota
from objectcache_storage_server.accounts.account_book import AccountBook
from objectcache_storage_server.accounts.directory import AccountDirectory
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.quotas.in_flight import Flight, InFlight
from objectcache_storage_server.quotas.quota_book import QuotaBook


async def call(function: Callable[[], Quota]) -> Quota:
    return function()


class Counted:
    """An `InFlight` over the buckets logs and kv and the user alice."""

    def __init__(
        self,
        user: Quota = Quota(),  # noqa: B008
        logs: Quota = Quota(),  # noqa: B008
        serving: int = 1,
    ) -> None:
        engine = MemoryEngine()
        for name, quota in (("logs", logs), ("kv", Quota())):
            engine.create_bucket(BucketInfo(name=name, owner="alice", region="", created_s=1.0))
            engine.configure_bucket(name, BucketConfiguration(quota=quota))
        book = AccountBook()
        change = PutUser(user=User(name="alice", created_s=1.0, quota=user), create=True)
        book.change(change, lambda user: [])
        quotas = QuotaBook(engine, book, AccountDirectory(book))
        self.in_flight = InFlight(quotas, lambda: serving)

    def flight(
        self, identity: str = "alice", bucket: str = "logs", deliveries: int = 0
    ) -> AbstractAsyncContextManager[Flight]:
        return self.in_flight.flight(identity, bucket, call, deliveries=deliveries)


@pytest.mark.asyncio
async def test_bytes_up_to_the_quota_fly_and_more_wait() -> None:
    counted = Counted(user=Quota(in_flight_bytes=100))
    async with counted.flight() as first, counted.flight(bucket="kv") as second:
        first.add_bytes(60)
        with pytest.raises(Busy, match="user alice may have 100 bytes in flight") as caught:
            second.add_bytes(41)
        assert caught.value.code == "SlowDown"
        assert caught.value.details.retry_after_s
        second.add_bytes(40)
    async with counted.flight() as third:
        third.add_bytes(100)  # all was given back


@pytest.mark.asyncio
async def test_a_buckets_quota_holds_for_all_who_use_it() -> None:
    counted = Counted(logs=Quota(in_flight_bytes=100))
    async with (
        counted.flight("alice") as first,
        counted.flight("bob") as second,
        counted.flight("bob", "kv") as elsewhere,
    ):
        first.add_bytes(60)
        with pytest.raises(Busy, match="bucket logs"):
            second.add_bytes(60)
        elsewhere.add_bytes(1000)


@pytest.mark.asyncio
async def test_a_request_that_is_too_large_alone_is_told_not_to_wait() -> None:
    counted = Counted(user=Quota(in_flight_bytes=100))
    async with counted.flight() as flight:
        flight.add_bytes(60)
        with pytest.raises(StorageFull, match="this request alone has 101") as caught:
            flight.add_bytes(41)
    assert caught.value.code == "QuotaExceeded"


@pytest.mark.asyncio
async def test_what_was_refused_counts_for_neither_side() -> None:
    counted = Counted(user=Quota(in_flight_bytes=100), logs=Quota(in_flight_bytes=50))
    async with counted.flight() as flight:
        flight.add_bytes(40)
        with pytest.raises(StorageFull):
            flight.add_bytes(20)
        assert flight.in_flight_bytes == 40
        async with counted.flight(bucket="kv") as other:
            other.add_bytes(60)


@pytest.mark.asyncio
async def test_an_unknown_size_takes_all_that_the_quotas_leave_to_one() -> None:
    counted = Counted(user=Quota(in_flight_bytes=100), logs=Quota(in_flight_bytes=80))
    async with counted.flight() as flight:
        flight.add_unknown(1 << 40)
        assert flight.in_flight_bytes == 80
        async with counted.flight() as other:
            with pytest.raises(Busy):
                other.add_unknown(1 << 40)
    async with Counted().flight() as free:
        free.add_unknown(1 << 40)
        assert free.in_flight_bytes == 1 << 40


@pytest.mark.asyncio
async def test_deliveries_are_bounded_and_other_requests_are_none() -> None:
    counted = Counted(user=Quota(deliveries=1))
    async with counted.flight(deliveries=1), counted.flight():
        with pytest.raises(Busy, match="1 deliveries at once"):
            await counted.flight(deliveries=1).__aenter__()
        async with counted.flight("bob", deliveries=1):
            pass
    async with counted.flight(deliveries=1):
        pass


@pytest.mark.asyncio
async def test_no_delivery_at_all_can_be_allowed() -> None:
    counted = Counted(logs=Quota(deliveries=0))
    with pytest.raises(Busy, match="bucket logs"):
        await counted.flight(deliveries=1).__aenter__()
    assert counted.in_flight.tenants() == ()


@pytest.mark.asyncio
async def test_what_goes_on_is_told_by_tenant_and_nothing_is_kept_of_the_idle() -> None:
    counted = Counted()
    async with counted.flight("bob", deliveries=1) as flight, counted.flight("alice"):
        flight.add_bytes(7)
        bob = TenantActivity(identity="bob", in_flight_bytes=7, deliveries=1)
        alice = TenantActivity(identity="alice", in_flight_bytes=0, deliveries=0)
        assert counted.in_flight.tenants() == (alice, bob)
        assert counted.in_flight.tenants("bob") == (bob,)
    assert counted.in_flight.tenants() == ()
    assert repr(counted.in_flight) == "<InFlight 0 tenants, 0 buckets>"


@pytest.mark.asyncio
async def test_an_error_gives_everything_back() -> None:
    counted = Counted(user=Quota(in_flight_bytes=10, deliveries=1))

    async def fail(flight: Flight) -> None:
        flight.add_bytes(10)
        raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            async with counted.flight(deliveries=1) as flight:
                await fail(flight)


@pytest.mark.asyncio
async def test_each_of_several_servers_has_its_part_rounded_up() -> None:
    counted = Counted(user=Quota(deliveries=4, in_flight_bytes=100), serving=3)
    async with counted.flight(deliveries=1) as first, counted.flight(deliveries=1) as second:
        with pytest.raises(Busy, match="of which each of 3 storage servers has its part"):
            async with counted.flight(deliveries=1):
                pass
        first.add_bytes(20)
        second.add_bytes(14)
        with pytest.raises(Busy, match="each of 3 storage servers"):
            second.add_bytes(1)


@pytest.mark.asyncio
async def test_a_request_that_is_alone_at_a_server_may_have_the_whole_quota() -> None:
    counted = Counted(user=Quota(in_flight_bytes=100), serving=3)
    async with counted.flight() as alone:
        alone.add_bytes(100)
        with pytest.raises(StorageFull):
            alone.add_bytes(1)
