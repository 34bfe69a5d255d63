"""Whether a client's session may ask for the next deliveries from a bucket by itself. Pure."""

from __future__ import annotations

from objectcache_gateway.access.permissions import Permission
from objectcache_gateway.signing.sigv4 import Authenticated
from objectcache_schemas.accounts import Access
from objectcache_schemas.messages.kv import ReadPass
from objectcache_schemas.records import BucketInfo


def read_pass(
    signed: Authenticated,
    permission: Permission,
    bucket: BucketInfo,
    versions: tuple[int, int] | None,
    now_s: float,
) -> ReadPass | None:
    """A pass for all of the bucket, as of these versions of accounts and buckets.

    None where their changes are not heard of, where not all of the bucket may be read, where a
    quota counts requests, which is done here, and for a presigned URL, which is good for what it
    names alone.
    """
    caller = permission.caller
    counted = (caller.requests_per_s, bucket.configuration.quota.requests_per_s)
    is_counted = any(quota is not None for quota in counted)
    if versions is None or signed.presigned or is_counted:
        return None
    if not permission.allows(Access.READ, ""):
        return None
    lives_s = None if caller.expires_s is None else caller.expires_s - now_s
    return ReadPass(signed.access_key, *versions, lives_s)
