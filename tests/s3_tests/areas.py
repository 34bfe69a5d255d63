"""Which part of S3 a test of the suite judges, and how much that part matters to this server.

The suite's own markers do not cover its core, so tests are told apart by their names. The first
rule that fits counts.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Tier(enum.Enum):
    """How much an area matters to a cache of KV chunks."""

    MUST = "must"  # clients need it on the data path or to administer
    SHOULD = "should"  # clients use it
    COULD = "could"  # parts of it fit a cache; the rest is refused
    OMIT = "omit"  # refused


@dataclass(frozen=True, slots=True)
class Area:
    """One part of S3. `tests` fits a test's name without `test_` and parameters, from its start."""

    name: str
    tier: Tier
    tests: re.Pattern[str]


def _area(tier: Tier, name: str, *alternatives: str) -> Area:
    return Area(name, tier, re.compile("|".join(f"(?:{one})$" for one in alternatives)))


_M, _S, _C, _O = Tier.MUST, Tier.SHOULD, Tier.COULD, Tier.OMIT

AREAS: tuple[Area, ...] = (
    _area(_O, "post_object", ".*post_object_.*"),
    _area(_O, "encryption_copy", "copy_enc", "copy_part_enc"),
    _area(_O, "auth_sigv2", ".*_aws2", "cors_presigned_.*_v2"),
    _area(_O, "logging", ".*bucket_logging.*"),
    _area(_O, "object_lock", "object_lock_.*"),
    _area(_O, "cloud_tier_restore", "lifecycle_(noncur_)?cloud_.*", "restore_.*", "read_through"),
    _area(_O, "encryption_sse_c", "encrypt(ed|ion)_.*", ".*sse_c.*", "put_obj_enc_conflict_c_.*"),
    _area(
        _O,
        "encryption_kms_s3",
        "sse_.*",
        ".*bucket_encryption.*",
        "put_obj_enc_.*",
        "bucket_policy_put_obj_(s3|kms)_.*",
    ),
    _area(
        _O,
        "rgw_extension",
        "account_usage",
        "head_bucket_usage",
        ".*_unordered",
        "bucket_head_extended",
        "get_object_torrent",
    ),
    _area(_C, "lifecycle", "lifecycle.*", "delete_marker_expiration"),
    _area(_C, "cond_delete_rgw", "delete_objects?_.*if_match.*"),
    _area(
        _C,
        "ownership",
        "create_bucket_(no_ownership|bucket_owner|object_writer).*",
        "put_bucket_ownership.*",
        "bucket_create_delete_bucket_ownership",
    ),
    _area(
        _C,
        "public_access_block",
        "get_.*policy_status",
        ".*public_block.*",
        "block_public.*",
        "ignore_public.*",
    ),
    _area(_S, "presigned", "object_raw_get_x_amz.*"),
    _area(
        _C,
        "versioning",
        "versioning_.*",
        "versioned_.*",
        ".*versioning",
        "delete_marker_.*",
        "multipart_copy_versioned",
        "object_copy_version.*",
        "(multipart_)?put_current_.*",
    ),
    _area(
        _C,
        "bucket_policy",
        "(set_get_del_)?bucket(v2)?_policy.*",
        "head_object_404_with_policy_prefix",
        "multipart_upload_on_a_bucket_with_policy",
    ),
    _area(_C, "cors", ".*cors.*"),
    _area(
        _M,
        "auth_anon_bad",
        "bucket_list(v2)?_objects_anonymous_fail",
        "list_buckets_(anonymous|invalid_auth|bad_auth)",
        "object_anon_put",
    ),
    _area(_S, "tagging", "(get|put|delete|set)_.*tag(s|ging)(_.*)?"),
    _area(
        _M,
        "http_headers",
        "(object|bucket)(_acl)?_(create|put)_(bad_.*|date_and_amz_date|amz_date_and_no_date|contentlength_none)",
        "100_continue.*",
    ),
    _area(
        _C,
        "acl",
        ".*acl.*",
        "access_bucket_.*",
        "object_anon_put_.*",
        "bucket_list(v2)?_objects_anonymous",
        "object_raw_get(_bucket_gone|_object_gone)?",
    ),
    _area(_S, "presigned", "object_(raw|presigned|put_authenticated).*"),
    _area(_S, "object_attributes", "get_.*object_attributes", ".*get_part"),
    _area(_M, "list_v2", "bucket_?(list)?v2.*", "basic_key_count"),
    _area(_S, "multipart_copy", "multipart_copy_.*", "upload_part_copy_.*"),
    _area(_S, "copy", "object_copy_.*", "copy_object_.*"),
    _area(_S, "conditional_get", "get_object_if.*"),
    _area(_S, "conditional_put", "put_object_if.*", "put_object_current_.*", "multipart_put_.*"),
    _area(_M, "checksum", ".*(checksum|cksum).*"),
    _area(_M, "multipart", "(atomic_)?multipart_.*", "(list|abort)_multipart.*"),
    _area(_M, "atomic", "atomic_.*"),
    _area(
        _M,
        "aws_chunked_te",
        "object_write_with_chunked_transfer_encoding",
        "object_content_encoding_aws_chunked",
    ),
    _area(_M, "delete_multi", "multi_object.*"),
    _area(_M, "range", "ranged_.*"),
    _area(_M, "list_v1", "bucket_list_(?!long_name).*"),
    _area(_M, "bucket_ops", "bucket_.*", "buckets?_.*", "list_buckets_.*", "expected_bucket_owner"),
    _area(_M, "object_crud", "object_.*"),
)


def area_of(test: str) -> Area | None:
    """The area of a test by its name, parameters and all; None for one that no rule fits."""
    name = test.rpartition("::")[2].partition("[")[0].removeprefix("test_")
    return next((area for area in AREAS if area.tests.match(name)), None)
