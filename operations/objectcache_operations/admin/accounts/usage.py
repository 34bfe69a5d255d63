"""`objectcache admin usage`: what users and buckets hold, beside what they may."""

from __future__ import annotations

from objectcache_operations.admin.command import Server, on_server, print_document, print_view
from objectcache_operations.admin.name_arguments import BucketOption, UserOption


@on_server
def usage(server: Server, user: UserOption = None, bucket: BucketOption = None) -> None:
    """Show what users and buckets hold, and what they may."""
    from rich.console import Group

    from objectcache_operations.admin.accounts.quotas import counted_text, used_text
    from objectcache_operations.admin.tables import table_of
    from objectcache_schemas.operators.admin_api import UsageReply

    with server.connect() as client:
        found = client.get("/v1/usage", UsageReply, user=user, bucket=bucket)
    if server.as_json:
        print_document(found)
        return
    users = [
        [
            one.user,
            f"{one.bucket_count:,}",
            counted_text(one.object_count, one.quota.object_count),
            used_text(one.stored_bytes, one.quota.stored_bytes),
            used_text(one.in_flight_bytes, one.quota.in_flight_bytes),
            counted_text(one.deliveries, one.quota.deliveries),
        ]
        for one in found.users
    ]
    buckets = [
        [
            one.bucket,
            one.owner,
            counted_text(one.object_count, one.quota.object_count),
            used_text(one.stored_bytes, one.quota.stored_bytes),
        ]
        for one in found.buckets
    ]
    of_users = ("user", "buckets", "objects", "stored", "in flight", "deliveries")
    of_buckets = ("bucket", "owner", "objects", "stored")
    print_view(
        Group(
            table_of(of_users, users, of_users[1:]), table_of(of_buckets, buckets, of_buckets[2:])
        )
    )
