"""What may be done to a bucket, and the errors that say why not. Pure."""

from __future__ import annotations

from objectcache_schemas.errors import Conflict, NotFound
from objectcache_schemas.layout import KvLayout
from objectcache_schemas.records import BucketConfiguration, BucketInfo


def no_such_bucket(name: str) -> NotFound:
    """For a name without a bucket."""
    return NotFound(f"bucket {name!r} does not exist", code="NoSuchBucket")


def no_such_key(key: str) -> NotFound:
    """For a key without an object."""
    return NotFound(f"{key!r} is not stored", key=key)


def bucket_exists(existing: BucketInfo, asked: BucketInfo) -> Conflict:
    """For a name that is taken, by the same owner or by another."""
    if existing.owner == asked.owner:
        message, code = "and is yours", "BucketAlreadyOwnedByYou"
    else:
        message, code = "and belongs to another", "BucketAlreadyExists"
    return Conflict(f"bucket {asked.name!r} exists already {message}", code=code)


def bucket_not_empty(name: str) -> Conflict:
    """For a bucket that is to be deleted and still holds objects."""
    return Conflict(f"bucket {name!r} still holds objects", code="BucketNotEmpty")


def check_configuration_change(bucket: BucketInfo, replaces: BucketConfiguration | None) -> None:
    """Raise `Conflict` where another configuration is in force than the one that was seen."""
    if replaces is not None and replaces != bucket.configuration:
        raise Conflict(
            "the bucket's configuration was changed meanwhile; read it and try again",
            code="OperationAborted",
        )


def check_layout_change(bucket: BucketInfo, layout: KvLayout, misfit_key: str | None) -> None:
    """Raise `Conflict` where the bucket has another layout, or an object that does not fit.

    `misfit_key` is any stored key whose size is not `layout.chunk_bytes`.
    """
    if bucket.layout is not None and bucket.layout != layout:
        raise Conflict(
            f"bucket {bucket.name!r} has another KV layout: {bucket.layout}",
            code="KvLayoutConflict",
        )
    if misfit_key is not None:
        raise Conflict(
            f"{misfit_key!r} in bucket {bucket.name!r} is not of {layout.chunk_bytes} bytes, "
            f"as a chunk of the layout is",
            code="KvLayoutConflict",
            key=misfit_key,
        )
