"""Requests on buckets as a whole: blocking functions over the engine."""

from __future__ import annotations

import contextlib
import math
import time

import msgspec

from objectcache_schemas.accounts import ROOT_USER
from objectcache_schemas.errors import AccessDenied, Conflict, InvalidRequest, NotFound
from objectcache_schemas.messages.buckets import (
    Bucket,
    ConfigureBucket,
    CreateBucket,
    DeleteBucket,
    GetBucket,
    ListBuckets,
    SetLayout,
    SetPolicy,
)
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.quotas import GetUsage, Usage
from objectcache_schemas.records import BucketInfo, BucketPolicy, Quota
from objectcache_storage_server.accounts.directory import FOLLOWED_TIMEOUT_S
from objectcache_storage_server.conversations.conversation import Conversation
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.bucket_rules import no_such_bucket
from objectcache_storage_server.s3 import multipart
from objectcache_storage_server.s3.bucket_configuration import check_configuration
from objectcache_storage_server.s3.bucket_pages import bucket_page
from objectcache_storage_server.s3.bucket_usage import bucket_usage
from objectcache_storage_server.service import Service

BucketLookup = GetBucket | ListBuckets | GetUsage
BucketChange = CreateBucket | DeleteBucket | SetLayout | SetPolicy | ConfigureBucket


def answer_lookup(service: Service, request: BucketLookup) -> msgspec.Struct:
    """The reply to a question about buckets."""
    engine = service.engine
    match request:
        case GetBucket():
            return Bucket(info=engine.bucket(request.name))
        case ListBuckets():
            return bucket_page(engine, request)
        case GetUsage():
            if request.bucket:
                check_not_hidden(request.bucket)
            tenants = () if request.bucket else service.in_flight.tenants(request.owner)
            return Usage(buckets=bucket_usage(engine, request), tenants=tenants)


async def serve_bucket_change(service: Service, talk: Conversation, request: BucketChange) -> None:
    """A change, answered when every gateway that can be reached has heard of it."""
    reply = await service.call(answer_change, service, request)
    await service.directory.wait_buckets_followed(FOLLOWED_TIMEOUT_S)
    await talk.send(reply)


def answer_change(service: Service, request: BucketChange) -> msgspec.Struct:
    """Change a bucket, and tell those who keep what they know of buckets."""
    try:
        _change(service, request)
    finally:  # also of a change that failed halfway
        service.directory.buckets_changed()
    return Done()


def _change(service: Service, request: BucketChange) -> None:
    engine = service.engine
    match request:
        case CreateBucket():
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
        case DeleteBucket():
            with service.configuring:
                _delete(service, request)
        case SetLayout():
            slice_block_bytes(request.layout.per_layer_chunk_bytes)
            engine.set_layout(request.bucket, request.layout)
        case SetPolicy():
            check_not_hidden(request.bucket)
            _check_policy(request.policy)
            engine.set_policy(request.bucket, request.policy)
        case ConfigureBucket():
            check_not_hidden(request.name)
            check_configuration(request.configuration)
            _configure(service, request)


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


def _delete(service: Service, request: DeleteBucket) -> None:
    """Delete an empty bucket, but no user a quota that was set for it: it could make the bucket
    again, without.
    """
    info = service.engine.bucket(request.name)
    has_quota = info.configuration.quota != Quota() or info.policy.quota_bytes is not None
    if has_quota and request.identity not in ("", ROOT_USER):
        raise AccessDenied(
            f"bucket {request.name} has a quota; an operator deletes it, or takes the quota off"
        )
    service.engine.delete_bucket(request.name)
    multipart.forget_uploads(service.engine, request.name)
    service.stored.bucket_deleted(info)


def _configure(service: Service, request: ConfigureBucket) -> None:
    """Replace the configuration that the caller has seen; raises `Conflict` for another."""
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
