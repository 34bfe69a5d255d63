"""Puts and requests as quotas see them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import CheckPut, RequestsTaken, TakeRequests
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.accounts.stored_ledger import Reservation
from objectcache_storage_server.service import Service


@dataclass(frozen=True, slots=True)
class CountedPut:
    """A put under way that quotas leave room for."""

    service: Service
    reservation: Reservation

    async def confirm(self, size_bytes: int) -> None:
        """Judge it again before it is committed: a quota may have changed, and its size was perhaps
        not known. Raises `StorageFull` (QuotaExceeded).
        """
        if not self.reservation.confirm_known(size_bytes):
            await self.service.call(self.reservation.confirm, size_bytes)


@asynccontextmanager
async def counted_put(
    service: Service,
    bucket: BucketInfo,
    identity: str,
    object_count: int,
    size_bytes: int | None,
) -> AsyncGenerator[CountedPut]:
    """Count a put for the length of the block, which ends after its commit.

    Raises `StorageFull` (QuotaExceeded) where it would exceed what the bucket or its owner may
    store, and `Busy` where too much is in flight for `identity` or the bucket. A size that is not
    known is judged at the commit.
    """
    async with service.in_flight.flight(identity, bucket.name, service.call) as flight:
        if size_bytes is None:
            flight.add_unknown(service.limits.object_bytes_max)
        else:
            flight.add_bytes(size_bytes)
        reservation = service.stored.empty(bucket)
        counted = CountedPut(service, reservation)
        try:
            reservation.object_count = object_count
            await counted.confirm(size_bytes or 0)
            yield counted
        finally:
            service.stored.release(reservation)


async def check_put(service: Service, request: CheckPut) -> Done:
    """`CheckPut`: raises what `counted_put` would."""
    bucket = await service.call(service.engine.bucket, request.bucket)
    async with counted_put(service, bucket, request.identity, 1, request.size_bytes):
        return Done()


async def take_requests(service: Service, request: TakeRequests) -> RequestsTaken:
    """`TakeRequests`: what the quotas of the tenant and of the bucket leave now."""
    rates_per_s: dict[str, float] = {}
    user_rate = service.quotas.of_user(request.identity).requests_per_s
    if user_rate is not None:
        rates_per_s[f"user {request.identity}"] = user_rate
    if request.bucket:
        quota = service.quotas.known_of_bucket(request.bucket)
        if quota is None:
            quota = await service.call(service.quotas.of_bucket, request.bucket)
        if quota.requests_per_s is not None:
            rates_per_s[f"bucket {request.bucket}"] = quota.requests_per_s
    if not rates_per_s:
        return RequestsTaken(granted=request.wanted, limited=False)
    now_s = time.monotonic()
    granted, wait_s = service.request_tokens.take(rates_per_s, request.wanted, now_s)
    return RequestsTaken(granted=granted, retry_after_s=wait_s)
