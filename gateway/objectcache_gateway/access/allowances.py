"""Quotas of requests: the storage server counts, and this gateway takes a few at a time from it.

A tenant that asks often takes more at once, so that few of its requests need a round trip; what it
does not use lapses soon, so that the gateways together grant about what the quota says.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from objectcache_gateway.access.permissions import Caller
from objectcache_schemas.errors import Busy
from objectcache_schemas.messages.quotas import RequestsTaken, TakeRequests
from objectcache_schemas.records import BucketInfo

ALLOWANCES_MAX = 4096  # tenants and buckets that are remembered
KEPT_S = 0.5  # of requests that were taken and not used
WANTED_MAX = 100
RETRY_AFTER_MIN_S = 0.05

Take = Callable[[TakeRequests], Awaitable[RequestsTaken]]


@dataclass(slots=True)
class _Allowance:
    """What one tenant may still ask, or may be asked of one bucket."""

    left: int = 0
    lapses_s: float = 0.0
    wanted: int = 1
    refused_until_s: float = 0.0


class RequestAllowances:
    """What all tenants may still ask, and be asked of all buckets.

    `take` asks the storage server; `clock` is monotonic.
    """

    def __init__(self, take: Take, clock: Callable[[], float] = time.monotonic) -> None:
        self._take = take
        self._clock = clock
        self._allowances: OrderedDict[tuple[str, str], _Allowance] = OrderedDict()

    async def spend_of_caller(self, caller: Caller) -> None:
        """Count one request for who asks, also where it is denied then: a denial is work, too.

        Raises `Busy` where the caller's quota leaves none.
        """
        if caller.requests_per_s is not None:
            await self._spend(caller.identity, "")

    async def spend_of_bucket(self, bucket: BucketInfo | None) -> None:
        """Count one request that a bucket was found to allow, so that strangers use up nothing.

        Raises `Busy` where the bucket's quota leaves none.
        """
        if bucket is not None and bucket.configuration.quota.requests_per_s is not None:
            await self._spend("", bucket.name)

    async def _spend(self, identity: str, bucket: str) -> None:
        allowance = self._allowance(identity, bucket)
        now_s = self._clock()
        if allowance.left and now_s < allowance.lapses_s:
            allowance.left -= 1
            return
        if now_s < allowance.refused_until_s:
            raise _too_many(allowance.refused_until_s - now_s)
        await self._refill(allowance, identity, bucket, now_s)

    async def _refill(
        self, allowance: _Allowance, identity: str, bucket: str, now_s: float
    ) -> None:
        """Take more, one of which is spent."""
        was_used_up = not allowance.left and now_s < allowance.lapses_s
        wanted = min(WANTED_MAX, 2 * allowance.wanted) if was_used_up else 1
        if now_s >= allowance.lapses_s:
            allowance.left = 0
        request = TakeRequests(identity=identity, bucket=bucket, wanted=wanted)
        taken = await self._take(request)
        if not taken.granted and taken.limited:
            wait_s = max(RETRY_AFTER_MIN_S, taken.retry_after_s)
            allowance.refused_until_s = now_s + wait_s
            raise _too_many(wait_s)
        allowance.wanted = wanted
        allowance.left += max(0, taken.granted - 1)
        allowance.lapses_s = self._clock() + KEPT_S

    def _allowance(self, identity: str, bucket: str) -> _Allowance:
        found = self._allowances.setdefault((identity, bucket), _Allowance())
        self._allowances.move_to_end((identity, bucket))
        if len(self._allowances) > ALLOWANCES_MAX:
            self._allowances.popitem(last=False)
        return found

    def __repr__(self) -> str:
        return f"<RequestAllowances {len(self._allowances)}/{ALLOWANCES_MAX}>"


def _too_many(wait_s: float) -> Busy:
    return Busy(
        "the quota of requests a second is used up", retry_after_s=wait_s, quota="requests_per_s"
    )
