"""Requests on buckets as a whole: blocking functions over the engine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import AccessDenied, Conflict, InvalidRequest, NotFound
from objectcache_schemas.messages.buckets import (
    ConfigureBucket,
    CreateBucket,
    DeleteBucket,
    SetLayout,
    SetPolicy,
)
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import GetUsage, Usage
from objectcache_schemas.records import BucketInfo, BucketPolicy, Quota
from objectcache_storage_server.accounts.directory import FOLLOWED_TIMEOUT_S
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.bucket_rules import no_such_bucket
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.bucket_configuration import check_configuration
from objectcache_storage_server.s3.bucket_usage import bucket_usage
from objectcache_storage_server.service import Service


def get_usage(service: Service, request: GetUsage) -> Usage:
    """`GetUsage`: what buckets hold, and of all of them what goes on for their owners."""
    if request.bucket:
        check_not_hidden(request.bucket)
    tenants = () if request.bucket else service.in_flight.tenants(request.owner)
    return Usage(buckets=bucket_usage(service.engine, request), tenants=tenants)


async def change_bucket(service: Service, change: Callable[[], None]) -> Done:
    """Make a change. It is answered when every gateway that can be reached has heard of it."""

    def change_and_tell() -> None:
        try:
            change()
        finally:  # also of a change that failed halfway
            service.directory.buckets_changed()

    await service.call(change_and_tell)
    await service.directory.wait_buckets_followed(FOLLOWED_TIMEOUT_S)
    return Done()


def create_bucket(service: Service, request: CreateBucket) -> None:
    """`CreateBucket`."""
    check_configuration(request.configuration)
    info = BucketInfo(
        name=request.name,
        owner=request.owner,
        region=request.region,
        created_s=time.time(),
        configuration=request.configuration,
    )
    with service.configuring, service.accounts.keeping(info.owner):
        _create(service, info)


def set_layout(service: Service, request: SetLayout) -> None:
    """`SetLayout`."""
    slice_block_bytes(request.layout.per_layer_chunk_bytes)
    service.engine.set_layout(request.bucket, request.layout)


def set_policy(service: Service, request: SetPolicy) -> None:
    """`SetPolicy`."""
    check_not_hidden(request.bucket)
    _check_policy(request.policy)
    service.engine.set_policy(request.bucket, request.policy)


def _create(service: Service, info: BucketInfo) -> None:
    """Make a bucket, which counts from before it is there."""
    with contextlib.suppress(NotFound):
        service.engine.bucket(info.name)
        service.engine.create_bucket(info)  # raises whose it is
    buckets_max = service.storage.buckets_per_user_max
    if info.owner != ROOT_USER and service.stored.bucket_count(info.owner) >= buckets_max:
        raise InvalidRequest(
            f"user {info.owner} owns {buckets_max} buckets, storage.buckets_per_user_max; delete "
            "one, or raise it",
            code="TooManyBuckets",
        )
    service.stored.bucket_created(info)
    try:
        service.engine.create_bucket(info)
    except BaseException:
        service.stored.bucket_deleted(info)
        raise


def delete_bucket(service: Service, request: DeleteBucket) -> None:
    """`DeleteBucket`: an empty one. No user deletes a quota that was set for it: it could make the
    bucket again, without.
    """
    with service.configuring:
        info = service.engine.bucket(request.name)
        has_quota = info.configuration.quota != Quota() or info.policy.quota_bytes is not None
        if has_quota and request.identity not in ("", ROOT_USER):
            raise AccessDenied(
                f"bucket {request.name} has a quota; an operator deletes it, or takes the quota off"
            )
        service.engine.delete_bucket(request.name)
        multipart.forget_uploads(service.engine, request.name)
        service.stored.bucket_deleted(info)


def configure_bucket(service: Service, request: ConfigureBucket) -> None:
    """`ConfigureBucket`: raises `Conflict` where the caller has seen another configuration."""
    check_not_hidden(request.name)
    check_configuration(request.configuration)
    with service.configuring:
        in_force = service.engine.bucket(request.name).configuration
        if request.replaces != in_force:
            raise Conflict(
                "the bucket's configuration was changed meanwhile; read it and try again",
                code="OperationAborted",
            )
        service.engine.configure_bucket(request.name, request.configuration)


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
