"""Buckets: made, configured, listed and deleted."""

from __future__ import annotations

from typing import Annotated

import msgspec

from objectcache_schemas.layout import KvLayout
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.message import Changes, Message, request
from objectcache_schemas.records import (
    BucketConfiguration,
    BucketInfo,
    BucketPolicy,
)


@request(Done, repeatable=False, changes=Changes.BUCKETS)
class SetPolicy(Message, frozen=True):
    """Replace a bucket's policy."""

    bucket: str
    policy: BucketPolicy


@request(Done, repeatable=False, changes=Changes.BUCKETS)
class CreateBucket(Message, frozen=True):
    """Create a bucket. Reply: `Done`; BucketAlreadyOwnedByYou or BucketAlreadyExists.

    `Done` for a change of a bucket comes when every gateway that follows the accounts has heard of
    it, or a second later.
    """

    name: str
    owner: str
    region: str
    configuration: BucketConfiguration = BucketConfiguration()


class Bucket(Message, frozen=True):
    """Reply to `GetBucket`.

    `buckets_version` is the one of `Directory` under which it was looked up: whoever follows the
    directory may keep the bucket where the version is its own, since it hears of every change after
    that. 0 is none.
    """

    info: BucketInfo
    buckets_version: int = 0


@request(Bucket, repeatable=True, changes=Changes.NOTHING)
class GetBucket(Message, frozen=True):
    """Look a bucket up."""

    name: str


@request(Done, repeatable=False, changes=Changes.BUCKETS)
class ConfigureBucket(Message, frozen=True):
    """Replace a bucket's configuration.

    OperationAborted where another is in force than the one that the caller has seen: whoever
    changes a part of it must not undo what others changed meanwhile.
    """

    name: str
    configuration: BucketConfiguration
    replaces: BucketConfiguration


@request(Done, repeatable=False, changes=Changes.BUCKETS)
class DeleteBucket(Message, frozen=True):
    """Delete an empty bucket. Reply: `Done`; BucketNotEmpty.

    AccessDenied for a user where the bucket has a quota, which would go with it.
    """

    name: str
    identity: str = ""  # who asks; empty is an operator


class Buckets(Message, frozen=True):
    """Reply to `ListBuckets`, of as many as fit a message. `next_start_after` continues; None is
    the end.
    """

    buckets: tuple[BucketInfo, ...]
    next_start_after: str | None = None


@request(Buckets, repeatable=True, changes=Changes.NOTHING)
class ListBuckets(Message, frozen=True):
    """List buckets by name, those after `start_after`."""

    start_after: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    with_configuration: bool = False  # without, every bucket's is the default


@request(Done, repeatable=False, changes=Changes.BUCKETS)
class SetLayout(Message, frozen=True):
    """Give a bucket its KV layout; the same one again is a success."""

    bucket: str
    layout: KvLayout
