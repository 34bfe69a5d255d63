"""What a commit does with each key, given what is stored under it. Pure."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from objectcache_schemas.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    StorageFull,
)
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.records import BucketInfo, Condition, ObjectInfo
from objectcache_storage_server.engines.base import BucketTotals, StagedPut, check_etag


class Verdict(enum.Enum):
    """What becomes of one put."""

    STORE = "store"
    KEEP = "keep"  # the same bytes are stored already


def judge(
    key: str,
    condition: Condition,
    is_immutable: bool,
    existing: ObjectInfo | None,
    holds_same_bytes: Callable[[], bool],
) -> Verdict:
    """Decide one put; `holds_same_bytes` compares the bytes and is asked only where it matters.

    Raises `PreconditionFailed`, `NotFound` or `Conflict` as `Engine.commit` says.
    """
    if condition.absent and existing is not None:
        raise PreconditionFailed(f"{key!r} is stored already", key=key)
    if condition.etag is not None:
        if existing is None:
            raise NotFound(f"{key!r} is not stored", key=key)
        check_etag(existing, condition.etag)
    if existing is not None and condition.not_etag == existing.etag:
        raise PreconditionFailed(f"the ETag of {key!r} is {existing.etag}", key=key)
    if existing is None or not is_immutable:
        return Verdict.STORE
    if holds_same_bytes():
        return Verdict.KEEP
    raise Conflict(f"other bytes are stored under the immutable key {key!r}", key=key)


def check_batch(puts: Sequence[StagedPut]) -> None:
    """Assert what `Engine.commit` asks of its caller: one bucket, distinct keys."""
    assert len({put.staged.bucket for put in puts}) <= 1, "a commit is of one bucket"
    assert len({put.staged.key for put in puts}) == len(puts), "a key twice in one commit"


def check_fits_layout(key: str, size_bytes: int, layout: KvLayout | None) -> None:
    """Raise `InvalidRequest` (DescriptorMismatch) for a chunk of another size than the layout's."""
    if layout is not None and size_bytes != layout.chunk_bytes:
        raise InvalidRequest(
            f"{key!r} has {size_bytes} bytes; a chunk of the bucket's KV layout has "
            f"{layout.chunk_bytes}",
            code="DescriptorMismatch",
            key=key,
        )


def check_quota(bucket: BucketInfo, stored_bytes: int, growth_bytes: int) -> None:
    """Raise `StorageFull` (QuotaExceeded) for growth that a bucket's quota does not let in."""
    quota_bytes = bucket.policy.quota_bytes
    if quota_bytes is not None and growth_bytes > 0 and stored_bytes + growth_bytes > quota_bytes:
        raise StorageFull(
            f"bucket {bucket.name!r} holds {stored_bytes} bytes, {growth_bytes} more are over its "
            f"quota_bytes of {quota_bytes}",
            code="QuotaExceeded",
            quota="stored_bytes",
        )


def check_configured_quota(
    bucket: BucketInfo, totals: BucketTotals, growth_bytes: int, growth_objects: int
) -> None:
    """The same for the quota of the bucket's configuration, which counts objects, too."""
    quota, stored_bytes = bucket.configuration.quota, totals.stored_bytes + growth_bytes
    object_count = totals.object_count + growth_objects
    if quota.stored_bytes is not None and growth_bytes > 0 and stored_bytes > quota.stored_bytes:
        raise StorageFull(
            f"bucket {bucket.name} may store {quota.stored_bytes} bytes, and would hold "
            f"{stored_bytes}; delete some, or raise the quota",
            code="QuotaExceeded",
            quota="stored_bytes",
        )
    if quota.object_count is not None and growth_objects > 0 and object_count > quota.object_count:
        raise StorageFull(
            f"bucket {bucket.name} may store {quota.object_count} objects, not {object_count}; "
            f"delete some, or raise the quota",
            code="QuotaExceeded",
            quota="object_count",
        )
