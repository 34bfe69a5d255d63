"""Changing a bucket's configuration, whoever else changes it at the same time."""

from __future__ import annotations

from collections.abc import Callable

from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_gateway.storage.tenant_storage import TenantStorage
from objectcache_schemas.errors import Conflict
from objectcache_schemas.messages.buckets import Bucket, ConfigureBucket, GetBucket
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketConfiguration

CHANGE_ATTEMPTS_MAX = 5  # each fails only because somebody else's change has succeeded


async def change_configuration(
    storage: StorageFleet | TenantStorage,
    name: str,
    change: Callable[[BucketConfiguration], BucketConfiguration],
) -> BucketConfiguration:
    """Replace a bucket's configuration by what `change` makes of it, whoever changes it meanwhile.

    Raises `NotFound` (NoSuchBucket), and `Conflict` (OperationAborted) where others change it all
    the time.
    """
    for attempt in range(1, CHANGE_ATTEMPTS_MAX + 1):
        seen = (await storage.call(GetBucket(name=name), Bucket)).info.configuration
        made = change(seen)
        try:
            request = ConfigureBucket(name=name, configuration=made, replaces=seen)
            await storage.call(request, Done)
        except Conflict as error:
            if error.code != "OperationAborted" or attempt == CHANGE_ATTEMPTS_MAX:
                raise
        else:
            return made
    raise AssertionError("the last attempt returns or raises")
