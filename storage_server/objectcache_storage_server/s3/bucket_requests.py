"""Requests on buckets as a whole: blocking functions over the engine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import AccessDenied, Conflict, InvalidRequest, NotFound
from objectcache_schemas.messages.buckets import (
    Bucket,
    ConfigureBucket,
    CreateBucket,
    DeleteBucket,
    GetBucket,
    SetLayout,
    SetPolicy,
)
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import GetUsage, Usage
from objectcache_schemas.records import BucketInfo, BucketPolicy, Quota
from objectcache_storage_server.accounts.directory import FOLLOWED_TIMEOUT_S
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.bucket_rules import no_such_bucket
from objectcache_storage_server.puts.store_means import StoreMeans
from objectcache_storage_server.quotas.bucket_usage import bucket_usage
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.bucket_configuration import check_configuration


def get_bucket(engine: Engine, request: GetBucket) -> Bucket:
    """`GetBucket`."""
    return Bucket(info=engine.bucket(request.name))


def get_usage(means: StoreMeans, request: GetUsage) -> Usage:
    """`GetUsage`: what buckets hold, and of all of them what goes on for their owners."""
    if request.bucket:
        check_not_hidden(request.bucket)
    tenants = () if request.bucket else means.books.in_flight.tenants(request.owner)
    return Usage(buckets=bucket_usage(means.calls.engine, request), tenants=tenants)


async def change_bucket(means: StoreMeans, change: Callable[[], None]) -> Done:
    """Make a change. It is answered when every gateway that can be reached has heard of it."""

    def change_and_tell() -> None:
        try:
            change()
        finally:  # also of a change that failed halfway
            means.books.directory.buckets_changed()

    await means.calls.call(change_and_tell)
    await means.books.directory.wait_buckets_followed(FOLLOWED_TIMEOUT_S)
    return Done()


def create_bucket(means: StoreMeans, request: CreateBucket) -> None:
    """`CreateBucket`."""
    check_configuration(request.configuration)
    info = BucketInfo(
        name=request.name,
        owner=request.owner,
        region=request.region,
        created_s=time.time(),
        configuration=request.configuration,
    )
    with means.configuring, means.books.accounts.keeping(info.owner):
        _create(means, info)


def set_layout(means: StoreMeans, request: SetLayout) -> None:
    """`SetLayout`."""
    slice_block_bytes(request.layout.per_layer_chunk_bytes)
    means.calls.engine.set_layout(request.bucket, request.layout)


def set_policy(means: StoreMeans, request: SetPolicy) -> None:
    """`SetPolicy`."""
    check_not_hidden(request.bucket)
    _check_policy(request.policy)
    means.calls.engine.set_policy(request.bucket, request.policy)


def _create(means: StoreMeans, info: BucketInfo) -> None:
    """Make a bucket, which counts from before it is there."""
    with contextlib.suppress(NotFound):
        means.calls.engine.bucket(info.name)
        means.calls.engine.create_bucket(info)  # raises whose it is
    buckets_max = means.settings.storage.buckets_per_user_max
    if info.owner != ROOT_USER and means.books.stored.bucket_count(info.owner) >= buckets_max:
        raise InvalidRequest(
            f"user {info.owner} owns {buckets_max} buckets, storage.buckets_per_user_max; delete "
            "one, or raise it",
            code="TooManyBuckets",
        )
    means.books.stored.bucket_created(info)
    try:
        means.calls.engine.create_bucket(info)
    except BaseException:
        means.books.stored.bucket_deleted(info)
        raise


def delete_bucket(means: StoreMeans, request: DeleteBucket) -> None:
    """`DeleteBucket`: an empty one. No user deletes a quota that was set for it: it could make the
    bucket again, without.
    """
    with means.configuring:
        info = means.calls.engine.bucket(request.name)
        has_quota = info.configuration.quota != Quota() or info.policy.quota_bytes is not None
        if has_quota and request.identity not in ("", ROOT_USER):
            raise AccessDenied(
                f"bucket {request.name} has a quota; an operator deletes it, or takes the quota off"
            )
        means.calls.engine.delete_bucket(request.name)
        multipart.forget_uploads(means.calls.engine, request.name)
        means.books.stored.bucket_deleted(info)


def configure_bucket(means: StoreMeans, request: ConfigureBucket) -> None:
    """`ConfigureBucket`: raises `Conflict` where the caller has seen another configuration."""
    check_not_hidden(request.name)
    check_configuration(request.configuration)
    with means.configuring:
        in_force = means.calls.engine.bucket(request.name).configuration
        if request.replaces != in_force:
            raise Conflict(
                "the bucket's configuration was changed meanwhile; read it and try again",
                code="OperationAborted",
            )
        means.calls.engine.configure_bucket(request.name, request.configuration)


def check_not_hidden(bucket: str) -> None:
    """The buckets that the server keeps for itself are nobody's to operate."""
    if bucket.startswith("."):
        raise no_such_bucket(bucket)


def _check_policy(policy: BucketPolicy) -> None:
    quota_bytes, ttl_s = policy.quota_bytes, policy.ttl_s
    if quota_bytes is not None and quota_bytes < 1:
        raise InvalidRequest(f"quota_bytes must be at least 1, got {quota_bytes}; nil is no quota")
    if ttl_s is not None and not 0 < ttl_s < math.inf:
        raise InvalidRequest(f"ttl_s must be above 0, got {ttl_s:g}; nil keeps objects forever")
