"""How a bucket's configuration is changed: a part of it, whoever changes others meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.buckets.buckets import get_bucket
from objectcache_schemas.errors import Conflict
from objectcache_schemas.messages.buckets import ConfigureBucket
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketConfiguration

CHANGE_ATTEMPTS_MAX = 5  # each fails only because somebody else's has succeeded


async def change_configuration(
    exchange: Exchange, change: Callable[[BucketConfiguration], BucketConfiguration]
) -> None:
    """Replace the configuration of the request's bucket by what `change` makes of it.

    Raises `NotFound` (NoSuchBucket), and `Conflict` (OperationAborted) where others change it all
    the time.
    """
    for attempt in range(1, CHANGE_ATTEMPTS_MAX + 1):
        seen = (await get_bucket(exchange)).configuration
        request = ConfigureBucket(name=exchange.bucket, configuration=change(seen), replaces=seen)
        try:
            await exchange.storage.call(request, Done)
        except Conflict as error:
            if error.code != "OperationAborted" or attempt == CHANGE_ATTEMPTS_MAX:
                raise
        else:
            return
