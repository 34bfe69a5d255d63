"""Requests on buckets as a whole: blocking functions over the engine."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import AccessDenied, InvalidRequest, NotFound
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
from objectcache_schemas.messages.writes import DeleteObjects
from objectcache_schemas.records import BucketInfo, BucketPolicy, Quota
from objectcache_storage_server.accounts.directory import FOLLOWED_TIMEOUT_S
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.bucket_rules import no_such_bucket
from objectcache_storage_server.engines.engine_calls import EngineCalls
from objectcache_storage_server.quotas.books import Books
from objectcache_storage_server.quotas.bucket_usage import bucket_usage
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.bucket_configuration import check_configuration


@dataclass(frozen=True, slots=True)
class BucketMeans:
    """What changes of buckets are served with."""

    calls: EngineCalls
    books: Books
    buckets_per_user_max: int
    # buckets are made and deleted one at a time, since they are counted
    making: threading.Lock = field(default_factory=threading.Lock)


def get_bucket(means: BucketMeans, request: GetBucket) -> Bucket:
    """`GetBucket`: as of now, on whichever server it was changed."""
    # The version first: what is found is never older than what the version stands for.
    version = means.books.directory.buckets_version
    return Bucket(
        info=means.calls.engine.fresh_bucket(request.name),
        buckets_version=version,
    )


def delete_objects(means: BucketMeans, request: DeleteObjects) -> Done:
    """`DeleteObjects`."""
    means.calls.engine.delete(request.bucket, request.keys)
    means.books.stored.shrunk(request.bucket)
    return Done()


def get_usage(means: BucketMeans, request: GetUsage) -> Usage:
    """`GetUsage`: what buckets hold, and of all of them what goes on for their owners."""
    if request.bucket:
        check_not_hidden(request.bucket)
    tenants = () if request.bucket else means.books.in_flight.tenants(request.owner)
    return Usage(buckets=bucket_usage(means.calls.engine, request), tenants=tenants)


async def change_bucket(means: BucketMeans, change: Callable[[], None]) -> Done:
    """Make a change. It is answered when every gateway that can be reached has heard of it."""

    def change_and_tell() -> None:
        try:
            change()
        finally:  # also of a change that failed halfway
            means.books.directory.buckets_changed()

    await means.calls.call(change_and_tell)
    await means.books.directory.wait_buckets_followed(FOLLOWED_TIMEOUT_S)
    return Done()


def create_bucket(means: BucketMeans, request: CreateBucket) -> None:
    """`CreateBucket`."""
    check_configuration(request.configuration)
    info = BucketInfo(
        name=request.name,
        owner=request.owner,
        region=request.region,
        created_s=time.time(),
        configuration=request.configuration,
    )
    with means.making, means.books.accounts.keeping(info.owner):
        _create(means, info)


def set_layout(means: BucketMeans, request: SetLayout) -> None:
    """`SetLayout`."""
    slice_block_bytes(request.layout.per_layer_chunk_bytes)
    means.calls.engine.set_layout(request.bucket, request.layout)


def set_policy(means: BucketMeans, request: SetPolicy) -> None:
    """`SetPolicy`."""
    check_not_hidden(request.bucket)
    _check_policy(request.policy)
    means.calls.engine.set_policy(request.bucket, request.policy)


def _create(means: BucketMeans, info: BucketInfo) -> None:
    """Make a bucket, which counts from before it is there."""
    with contextlib.suppress(NotFound):
        means.calls.engine.bucket(info.name)
        means.calls.engine.create_bucket(info)  # raises whose it is
    buckets_max = means.buckets_per_user_max
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


def delete_bucket(means: BucketMeans, request: DeleteBucket) -> None:
    """`DeleteBucket`: an empty one. No user deletes a quota that was set for it: it could make the
    bucket again, without.
    """

    def judge(bucket: BucketInfo) -> None:
        has_quota = bucket.configuration.quota != Quota() or bucket.policy.quota_bytes is not None
        if has_quota and request.identity not in ("", ROOT_USER):
            raise AccessDenied(
                f"bucket {request.name} has a quota; an operator deletes it, or takes the quota off"
            )

    with means.making:
        info = means.calls.engine.bucket(request.name)
        means.calls.engine.delete_bucket(request.name, judge)
        multipart.forget_uploads(means.calls.engine, request.name)
        means.books.stored.bucket_deleted(info)


def configure_bucket(means: BucketMeans, request: ConfigureBucket) -> None:
    """`ConfigureBucket`: raises `Conflict` where the caller has seen another configuration."""
    check_not_hidden(request.name)
    check_configuration(request.configuration)
    means.calls.engine.configure_bucket(request.name, request.configuration, request.replaces)


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
