"""Requests on buckets as a whole: blocking functions over the engine."""

from __future__ import annotations

import math
import time

import msgspec

from objectcache_schemas.errors import Conflict, InvalidRequest
from objectcache_schemas.messages import (
    Bucket,
    Buckets,
    ConfigureBucket,
    CreateBucket,
    DeleteBucket,
    Done,
    GetBucket,
    GetUsage,
    ListBuckets,
    SetLayout,
    SetPolicy,
    Usage,
)
from objectcache_schemas.records import BucketInfo, BucketPolicy
from objectcache_storage_server import multipart
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.bucket_rules import no_such_bucket
from objectcache_storage_server.service import Service
from objectcache_storage_server.usage import bucket_usage

BucketLookup = GetBucket | ListBuckets | GetUsage
BucketChange = CreateBucket | DeleteBucket | SetLayout | SetPolicy | ConfigureBucket


def answer_lookup(service: Service, request: BucketLookup) -> msgspec.Struct:
    """The reply to a question about buckets."""
    engine = service.engine
    match request:
        case GetBucket():
            return Bucket(info=engine.bucket(request.name))
        case ListBuckets():
            return Buckets(buckets=tuple(engine.buckets()))
        case GetUsage():
            if request.bucket:
                check_not_hidden(request.bucket)
            tenants = () if request.bucket else service.in_flight.tenants(request.owner)
            return Usage(buckets=bucket_usage(engine, request), tenants=tenants)


def answer_change(service: Service, request: BucketChange) -> msgspec.Struct:
    """Change a bucket, and tell those who keep what they know of buckets."""
    _change(service, request)
    service.on_buckets_changed()
    return Done()


def _change(service: Service, request: BucketChange) -> None:
    engine = service.engine
    match request:
        case CreateBucket():
            engine.create_bucket(
                BucketInfo(
                    name=request.name,
                    owner=request.owner,
                    region=request.region,
                    created_s=time.time(),
                )
            )
        case DeleteBucket():
            engine.delete_bucket(request.name)
            multipart.forget_uploads(engine, request.name)
            service.stored.bucket_deleted(request.name)
        case SetLayout():
            slice_block_bytes(request.layout.per_layer_chunk_bytes)
            engine.set_layout(request.bucket, request.layout)
        case SetPolicy():
            check_not_hidden(request.bucket)
            _check_policy(request.policy)
            engine.set_policy(request.bucket, request.policy)
        case ConfigureBucket():
            check_not_hidden(request.name)
            _configure(service, request)


def _configure(service: Service, request: ConfigureBucket) -> None:
    """Replace the configuration that the caller has seen, or whatever is in force."""
    with service.configuring:
        in_force = service.engine.bucket(request.name).configuration
        if request.replaces is not None and request.replaces != in_force:
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
