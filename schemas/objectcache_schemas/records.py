"""What the store keeps beside bytes: buckets, objects, parts and uploads, as they cross a wire."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from objectcache_schemas.layout import KvLayout


class AclPermission(enum.Enum):
    """What a grant of an access control list allows."""

    READ = "READ"
    WRITE = "WRITE"
    READ_ACP = "READ_ACP"  # read the list
    WRITE_ACP = "WRITE_ACP"  # replace the list
    FULL_CONTROL = "FULL_CONTROL"


class AclGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One entry of an access control list of S3."""

    grantee: str  # a user's name, or the URI of a group
    permission: AclPermission


FULL_OBJECT, COMPOSITE = "FULL_OBJECT", "COMPOSITE"  # types of checksums, as S3 calls them


class ObjectAttributes(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """What S3 stores beside an object's bytes; header values as they arrived."""

    content_type: str | None = None
    content_encoding: str | None = None
    content_disposition: str | None = None
    content_language: str | None = None
    cache_control: str | None = None
    expires: str | None = None
    user_metadata: dict[str, str] = {}  # names without the x-amz-meta- prefix, lowercase
    checksums: dict[str, str] = {}  # algorithm in lowercase ("crc32") to its base64 value
    checksum_type: str | None = None  # one of the two above
    part_sizes_bytes: tuple[int, ...] = ()  # of a completed multipart upload
    part_checksums: tuple[str, ...] = ()  # of its parts, where the upload has a checksum algorithm
    tags: dict[str, str] = {}
    owner: str = ""  # who stored it; empty is the bucket's owner
    acl: tuple[AclGrant, ...] = ()  # what others may do; the owner may do everything

    def checksums_of_part(self, number: int) -> dict[str, str]:
        """Checksums of a part by its number, from 1 on; empty where none are kept."""
        if not self.part_checksums or len(self.checksums) != 1:
            return {}
        return dict.fromkeys(self.checksums, self.part_checksums[number - 1])


class ObjectInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, gc=False):
    """One stored object, without its bytes."""

    key: str
    size_bytes: int
    etag: str  # without quotes
    modified_s: float  # Unix time
    attributes: ObjectAttributes = ObjectAttributes()


class Durability(enum.Enum):
    """When a put is acknowledged."""

    SYNC = "sync"  # once no crash can lose it
    ASYNC = "async"  # once it is readable; a power loss may lose the last second


class Verification(enum.Enum):
    """Which slices are compared with their checksums when they are read; and which rows of slices
    that are put encoded are decoded again, and compared, before the put is acknowledged.
    """

    FULL = "full"
    SAMPLED = "sampled"  # one of 16, at random
    OFF = "off"


class Freshness(enum.Enum):
    """What reads of a bucket see of writes through other servers of the same store."""

    FRESH = "fresh"  # all that were acknowledged before: the store is asked each time
    INDEXED = "indexed"  # what this server has replayed: at most a moment old


class StoredEncoding(enum.Enum):
    """How the slices of chunks are stored so that they are fewer bytes; readers get what was put.
    What is encoded says so itself: nothing of it depends on the policy of the moment.
    """

    PLANES_ZSTD = "planes-zstd"
    PLANES_DEFLATE = "planes-deflate"


class BucketPolicy(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """What an operator may choose for a bucket."""

    durability: Durability = Durability.SYNC
    verification: Verification = Verification.FULL
    quota_bytes: int | None = None  # stored bytes, more are refused or evict; None is no quota
    ttl_s: float | None = None  # age since the put after which an object is gone; None is never
    reads: Freshness | None = None  # of a shared store; None is indexed with a layout, else fresh
    encoding: StoredEncoding | None = None  # of chunks that are put or moved from now on


class EtagMode(enum.Enum):
    """What the ETag of a put says."""

    MD5 = "md5"  # as S3: the MD5 of the bytes
    OPAQUE = "opaque"  # contains a dash, which clients take for no MD5; saves hashing


class Quota(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """Limits of a user or of a bucket; None is no limit."""

    stored_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    object_count: Annotated[int, msgspec.Meta(ge=0)] | None = None
    requests_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None
    in_flight_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None  # of puts and deliveries
    deliveries: Annotated[int, msgspec.Meta(ge=0)] | None = None  # at once


class LifecycleRule(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """Objects whose keys begin with `prefix` go `expiration_days` after they were stored.

    Uploads begun and not completed go `abort_uploads_days` after they were begun.
    """

    rule_id: str
    prefix: str = ""
    has_filter: bool = True  # False: written as before S3 had a Filter, and shown so
    enabled: bool = True
    expiration_days: Annotated[int, msgspec.Meta(ge=1)] | None = None
    abort_uploads_days: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def covers(self, key: str) -> bool:
        """Whether the rule is in force for a key."""
        return self.enabled and key.startswith(self.prefix)


class BucketConfiguration(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """What a bucket's owner or an operator chose, beside its policy. Engines keep it; that of a
    store which several servers share also judges its quota of stored bytes and objects.
    """

    etag_mode: EtagMode = EtagMode.MD5
    quota: Quota = Quota()
    lifecycle: tuple[LifecycleRule, ...] = ()
    tags: dict[str, str] = {}
    acl: tuple[AclGrant, ...] = ()  # what others than the owner may do; see gateway.acls


class BucketInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One bucket."""

    name: str
    owner: str
    region: str
    created_s: float  # Unix time
    layout: KvLayout | None = None
    policy: BucketPolicy = BucketPolicy()
    configuration: BucketConfiguration = BucketConfiguration()


class PartInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One stored part of a multipart upload."""

    part_number: int
    size_bytes: int
    etag: str
    modified_s: float
    checksums: dict[str, str] = {}


class UploadInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One open multipart upload."""

    key: str
    upload_id: str
    created_s: float
    attributes: ObjectAttributes = ObjectAttributes()


class Condition(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """When a put may become visible. Nothing set: always."""

    absent: bool = False  # If-None-Match: *
    etag: str | None = None  # If-Match; "*" is any existing object
    not_etag: str | None = None  # If-None-Match with an ETag; a key that is not stored is well
    immutable: bool = False  # an existing key with the same bytes is a success, others a conflict
