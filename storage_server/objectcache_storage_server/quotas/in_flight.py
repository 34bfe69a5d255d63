"""What goes on for every tenant and in every bucket: bytes of puts and deliveries, and deliveries.

Bytes are those of a put until it is committed, those that the server holds for a body, and those
that a delivery writes into a target.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from objectcache_schemas.errors import Busy, StorageFull
from objectcache_schemas.messages.quotas import TenantActivity
from objectcache_schemas.records import Quota
from objectcache_storage_server.quotas.quota_book import QuotaBook

RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Activity:
    """What goes on for one tenant, or in one bucket."""

    in_flight_bytes: int = 0
    deliveries: int = 0
    flights: int = 0


@dataclass(slots=True)
class _Side:
    """One of the two that a request counts for."""

    what: str
    name: str
    quota: Quota
    activity: _Activity


class Flight:
    """One request that is being served; what it adds is taken back when it ends."""

    def __init__(self, ledger: InFlight, sides: list[_Side], deliveries: int) -> None:
        self._ledger = ledger
        self.sides = sides
        self.deliveries = deliveries
        self.in_flight_bytes = 0

    def add_bytes(self, more_bytes: int) -> None:
        """More is in flight. Raises `Busy` where a quota leaves no room now, `StorageFull`
        (QuotaExceeded) where the request alone is over it.
        """
        self._ledger.add_bytes(self, more_bytes)

    def add_unknown(self, bytes_max: int) -> None:
        """The same for a size that nobody knows yet: all that the quotas leave to one request."""
        limits = [one.quota.in_flight_bytes for one in self.sides]
        self.add_bytes(min([bytes_max, *(limit for limit in limits if limit is not None)]))


class InFlight:
    """The activity of all tenants and buckets. Safe from any thread."""

    def __init__(self, quotas: QuotaBook, serving: Callable[[], int] = lambda: 1) -> None:
        """`serving` servers share the quotas: each has its part of them, rounded up."""
        self._quotas = quotas
        self._serving = serving
        self._lock = threading.Lock()
        self._tenants: dict[str, _Activity] = {}
        self._buckets: dict[str, _Activity] = {}

    @asynccontextmanager
    async def flight(
        self,
        identity: str,
        bucket: str,
        call: Callable[[Callable[[], Quota]], Awaitable[Quota]],
        *,
        deliveries: int = 0,
    ) -> AsyncGenerator[Flight]:
        """Count a request for the length of the block; `call` runs what blocks.

        Raises `Busy` where a quota of deliveries is used up.
        """
        quota = self._quotas.known_of_bucket(bucket)
        if quota is None:
            quota = await call(lambda: self._quotas.of_bucket(bucket))
        flight = self._begin(identity, bucket, quota, deliveries)
        try:
            yield flight
        finally:
            self._end(flight)

    def _begin(self, identity: str, bucket: str, bucket_quota: Quota, deliveries: int) -> Flight:
        user_quota = self._quotas.of_user(identity)
        with self._lock:
            sides = [
                _Side("user", identity, user_quota, self._tenants.get(identity) or _Activity()),
                _Side("bucket", bucket, bucket_quota, self._buckets.get(bucket) or _Activity()),
            ]
            for side in sides:
                _check_deliveries(side, deliveries, self._serving())
            self._tenants[identity], self._buckets[bucket] = (side.activity for side in sides)
            for side in sides:
                side.activity.flights += 1
                side.activity.deliveries += deliveries
        return Flight(self, sides, deliveries)

    def add_bytes(self, flight: Flight, more_bytes: int) -> None:
        """See `Flight.add_bytes`."""
        with self._lock:
            for side in flight.sides:
                _check_bytes(side, flight, more_bytes, self._serving())
            for side in flight.sides:
                side.activity.in_flight_bytes += more_bytes
            flight.in_flight_bytes += more_bytes

    def _end(self, flight: Flight) -> None:
        with self._lock:
            for side, activities in zip(flight.sides, (self._tenants, self._buckets), strict=True):
                side.activity.in_flight_bytes -= flight.in_flight_bytes
                side.activity.deliveries -= flight.deliveries
                side.activity.flights -= 1
                if not side.activity.flights:
                    del activities[side.name]

    def tenants(self, name: str = "") -> tuple[TenantActivity, ...]:
        """What goes on for every tenant, or for one, by name."""
        with self._lock:
            return tuple(
                TenantActivity(
                    identity=identity,
                    in_flight_bytes=activity.in_flight_bytes,
                    deliveries=activity.deliveries,
                )
                for identity, activity in sorted(self._tenants.items())
                if name in ("", identity)
            )

    def __repr__(self) -> str:
        return f"<InFlight {len(self._tenants)} tenants, {len(self._buckets)} buckets>"


def _check_deliveries(side: _Side, more: int, serving: int) -> None:
    limit = side.quota.deliveries
    if limit is not None and more and side.activity.deliveries + more > -(-limit // serving):
        raise Busy(
            f"{side.what} {side.name} may have {limit} deliveries at once{_shared(serving)}",
            retry_after_s=RETRY_AFTER_S,
            quota="deliveries",
        )


def _check_bytes(side: _Side, flight: Flight, more_bytes: int, serving: int) -> None:
    """One request that is alone here may have all of it, whatever the server's part is."""
    limit = side.quota.in_flight_bytes
    if limit is None:
        return
    if flight.in_flight_bytes + more_bytes > limit:
        raise StorageFull(
            f"{side.what} {side.name} may have {limit} bytes in flight, and this request alone has "
            f"{flight.in_flight_bytes + more_bytes}",
            code="QuotaExceeded",
            quota="in_flight_bytes",
        )
    others_bytes = side.activity.in_flight_bytes - flight.in_flight_bytes
    if others_bytes and side.activity.in_flight_bytes + more_bytes > -(-limit // serving):
        raise Busy(
            f"{side.what} {side.name} may have {limit} bytes in flight{_shared(serving)}",
            retry_after_s=RETRY_AFTER_S,
            quota="in_flight_bytes",
        )


def _shared(serving: int) -> str:
    return f", of which each of {serving} storage servers has its part" if serving > 1 else ""
