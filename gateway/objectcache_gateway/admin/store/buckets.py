"""Buckets: owners, layouts, policies, configurations, quotas and pins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from objectcache_gateway.admin.serving.routes import Call, Nothing, Route, changed, page_of
from objectcache_gateway.request.addressing import check_bucket_name
from objectcache_gateway.storage import change_bucket
from objectcache_gateway.storage.storage_fleet import StorageFleet
from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import Conflict, ObjectCacheError
from objectcache_schemas.messages.buckets import (
    Bucket,
    Buckets,
    CreateBucket,
    DeleteBucket,
    GetBucket,
    ListBuckets,
    SetLayout,
    SetPolicy,
)
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import BucketUsage, GetUsage, Usage
from objectcache_schemas.messages.writes import ObjectsPinned, PinObjects
from objectcache_schemas.operators.admin_api import (
    BucketChoice,
    BucketList,
    BucketView,
    ConfigurationChange,
    NewBucket,
    Pins,
    PinsReply,
    PolicyChange,
    QuotaChange,
)
from objectcache_schemas.records import BucketConfiguration, BucketInfo, BucketPolicy, Quota


async def bucket_info(storage: StorageFleet, name: str) -> BucketInfo:
    """The bucket; raises `NotFound`."""
    return (await storage.call(GetBucket(name=name), Bucket)).info


async def all_buckets(storage: StorageFleet) -> dict[str, BucketInfo]:
    """All buckets by name."""
    found: dict[str, BucketInfo] = {}
    after: str | None = ""
    while after is not None:
        request = ListBuckets(start_after=after, with_configuration=True)
        page = await storage.call(request, Buckets)
        found |= {info.name: info for info in page.buckets}
        after = page.next_start_after
    return found


async def usage_of(storage: StorageFleet, bucket: str = "") -> dict[str, BucketUsage]:
    """What buckets hold, by name."""
    usage = await storage.call(GetUsage(bucket=bucket), Usage)
    return {one.bucket: one for one in usage.buckets}


def bucket_view(info: BucketInfo, usage: BucketUsage | None) -> BucketView:
    """A bucket as the API shows it."""
    return BucketView(
        **msgspec.structs.asdict(info),
        object_count=usage.object_count if usage else 0,
        stored_bytes=usage.stored_bytes if usage else 0,
        encoded_bytes=usage.encoded_bytes if usage else 0,
        decoded_bytes=usage.decoded_bytes if usage else 0,
    )


async def list_buckets(call: Call[Nothing, BucketChoice]) -> BucketList:
    """A page of buckets, of all users or one."""
    query = call.query
    infos = {
        name: info
        for name, info in (await all_buckets(call.storage)).items()
        if query.owner in ("", info.owner)
    }
    shown, next_after = page_of(infos, query.after, query.limit)
    usage = await usage_of(call.storage)
    views = tuple(bucket_view(info, usage.get(info.name)) for info in shown)
    return BucketList(buckets=views, next_after=next_after)


async def _view(storage: StorageFleet, name: str) -> BucketView:
    info = await bucket_info(storage, name)
    return bucket_view(info, (await usage_of(storage, name)).get(name))


async def get_bucket(call: Call[Nothing, Nothing]) -> BucketView:
    """One bucket."""
    return await _view(call.storage, call.names["bucket"])


async def add_bucket(call: Call[NewBucket, Nothing]) -> BucketView:
    """Make a bucket with all that is given, or nothing."""
    new = call.body
    check_bucket_name(new.name)
    if new.owner != ROOT_USER:
        (await call.accounts.look()).user(new.owner)
    region = call.reach.settings.gateway.region
    if new.name in await all_buckets(call.storage):
        raise Conflict(f"bucket {new.name!r} exists already", code="BucketAlreadyExists")
    configuration = BucketConfiguration(etag_mode=new.etag_mode, quota=new.quota)
    create = CreateBucket(
        name=new.name, owner=new.owner, region=region, configuration=configuration
    )
    await call.storage.call(create, Done)
    try:
        if new.layout is not None:
            await call.storage.call(SetLayout(bucket=new.name, layout=new.layout), Done)
    except ObjectCacheError:
        await call.storage.call(DeleteBucket(name=new.name), Done)
        raise
    return await _view(call.storage, new.name)


async def delete_bucket(call: Call[Nothing, Nothing]) -> None:
    """Delete an empty bucket."""
    await call.storage.call(DeleteBucket(name=call.names["bucket"]), Done)


async def change_policy(call: Call[PolicyChange, Nothing]) -> BucketPolicy:
    """Change a bucket's policy."""
    name = call.names["bucket"]
    async with call.accounts.changing:
        policy = changed((await bucket_info(call.storage, name)).policy, call.body)
        await call.storage.call(SetPolicy(bucket=name, policy=policy), Done)
    return (await bucket_info(call.storage, name)).policy


async def change_configuration(call: Call[ConfigurationChange, Nothing]) -> BucketConfiguration:
    """Change a bucket's configuration."""
    return await _configure(call, lambda configuration: changed(configuration, call.body))


async def change_quota(call: Call[QuotaChange, Nothing]) -> Quota:
    """Change a bucket's quota."""
    configured = await _configure(
        call,
        lambda configuration: msgspec.structs.replace(
            configuration, quota=changed(configuration.quota, call.body)
        ),
    )
    return configured.quota


async def get_quota(call: Call[Nothing, Nothing]) -> Quota:
    """A bucket's quota."""
    return (await bucket_info(call.storage, call.names["bucket"])).configuration.quota


async def _configure(
    call: Call[Any, Any], change: Callable[[BucketConfiguration], BucketConfiguration]
) -> BucketConfiguration:
    return await change_bucket.change_configuration(call.storage, call.names["bucket"], change)


async def pin(call: Call[Pins, Nothing]) -> PinsReply:
    """Pin or unpin objects."""
    request = PinObjects(bucket=call.names["bucket"], keys=call.body.keys, pinned=call.body.pinned)
    return PinsReply(count=(await call.storage.call(request, ObjectsPinned)).count)


_BUCKET = "/v1/buckets/{bucket}"
ROUTES = (
    Route(
        *("GET", "/v1/buckets", "buckets:read", "List buckets", list_buckets, BucketList),
        query=BucketChoice,
    ),
    Route(
        *("POST", "/v1/buckets", "buckets:write", "Make a bucket for a user", add_bucket),
        *(BucketView, NewBucket),
        status=201,
    ),
    Route("GET", _BUCKET, "buckets:read", "Show a bucket", get_bucket, BucketView),
    Route("DELETE", _BUCKET, "buckets:write", "Delete an empty bucket", delete_bucket, status=204),
    Route(
        *("PATCH", f"{_BUCKET}/policy", "buckets:write", "Change a bucket's policy"),
        *(change_policy, BucketPolicy, PolicyChange),
    ),
    Route(
        *("PATCH", f"{_BUCKET}/configuration", "buckets:write", "Change a bucket's configuration"),
        *(change_configuration, BucketConfiguration, ConfigurationChange),
    ),
    Route("GET", f"{_BUCKET}/quota", "buckets:read", "Show a bucket's quota", get_quota, Quota),
    Route(
        *("PATCH", f"{_BUCKET}/quota", "buckets:write", "Change a bucket's quota", change_quota),
        *(Quota, QuotaChange),
    ),
    Route(
        *("POST", f"{_BUCKET}/pins", "buckets:write", "Pin or unpin objects", pin),
        *(PinsReply, Pins),
    ),
)
