"""What buckets hold, as an operator is told."""

from __future__ import annotations

from collections.abc import Iterator

from objectcache_schemas.errors import NotFound
from objectcache_schemas.messages.quotas import BucketUsage, GetUsage
from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.engines.base import Engine


def bucket_usage(engine: Engine, request: GetUsage) -> tuple[BucketUsage, ...]:
    """What the asked buckets hold, by name. Raises `NotFound` (NoSuchBucket) for a name."""
    found: list[BucketUsage] = []
    for bucket in _asked_buckets(engine, request):
        try:
            totals = engine.usage(bucket.name)
        except NotFound:  # deleted since it was listed
            continue
        found.append(
            BucketUsage(
                bucket=bucket.name,
                owner=bucket.owner,
                object_count=totals.object_count,
                stored_bytes=totals.stored_bytes,
                encoded_bytes=totals.encoded_bytes,
                decoded_bytes=totals.decoded_bytes,
            )
        )
    return tuple(found)


def _asked_buckets(engine: Engine, request: GetUsage) -> Iterator[BucketInfo]:
    buckets = iter([engine.bucket(request.bucket)]) if request.bucket else engine.each_bucket()
    return (bucket for bucket in buckets if request.owner in ("", bucket.owner))
