"""Usage: what users and buckets hold, and what they may."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from objectcache_gateway.admin.serving.routes import Call, Nothing, Route
from objectcache_gateway.admin.serving.storage_servers import answers_of
from objectcache_gateway.admin.store.buckets import all_buckets
from objectcache_gateway.admin.store.schedule import joined_activity
from objectcache_schemas.accounts import User
from objectcache_schemas.messages.quotas import GetUsage, TenantActivity, Usage
from objectcache_schemas.operators.admin_api import (
    BucketUsageView,
    UsageChoice,
    UsageReply,
    UserUsage,
)
from objectcache_schemas.records import BucketInfo, Quota

BUCKETS_MAX = 10_000


async def get_usage(call: Call[Nothing, UsageChoice]) -> UsageReply:
    """Usage of everybody, of a user, or of a bucket."""
    query = call.query
    accounts = await call.accounts.look()
    request = GetUsage(owner=query.user, bucket=query.bucket)
    usages = await answers_of(call.storage, request, Usage)
    buckets = bucket_usage(usages[0], await all_buckets(call.storage))
    users = user_usage(buckets, joined_activity(usages), accounts.users)
    if query.user:
        users = tuple(one for one in users if one.user == query.user)
    if query.bucket:
        owners = {one.owner for one in buckets}
        users = tuple(one for one in users if one.user in owners)
    return UsageReply(users=users, buckets=buckets[:BUCKETS_MAX])


def bucket_usage(usage: Usage, infos: Mapping[str, BucketInfo]) -> tuple[BucketUsageView, ...]:
    """What each bucket holds, beside what it may."""
    return tuple(
        BucketUsageView(
            bucket=one.bucket,
            owner=one.owner,
            object_count=one.object_count,
            stored_bytes=one.stored_bytes,
            quota=infos[one.bucket].configuration.quota if one.bucket in infos else Quota(),
        )
        for one in sorted(usage.buckets, key=lambda one: one.bucket)
    )


def user_usage(
    buckets: Iterable[BucketUsageView],
    tenants: Iterable[TenantActivity],
    users: Mapping[str, User],
) -> tuple[UserUsage, ...]:
    """The sums of each user's buckets, beside what goes on for it and what it may.

    Owners that are no users, such as root, have no quota.
    """
    activity = {one.identity: one for one in tenants}
    held: dict[str, list[BucketUsageView]] = {name: [] for name in (*users, *activity)}
    for one in buckets:
        held.setdefault(one.owner, []).append(one)
    return tuple(
        UserUsage(
            user=name,
            bucket_count=len(held[name]),
            object_count=sum(one.object_count for one in held[name]),
            stored_bytes=sum(one.stored_bytes for one in held[name]),
            in_flight_bytes=activity[name].in_flight_bytes if name in activity else 0,
            deliveries=activity[name].deliveries if name in activity else 0,
            quota=users[name].quota if name in users else Quota(),
        )
        for name in sorted(held)
    )


ROUTES = (
    Route(
        *("GET", "/v1/usage", "usage:read", "What users and buckets hold", get_usage, UsageReply),
        query=UsageChoice,
    ),
)
