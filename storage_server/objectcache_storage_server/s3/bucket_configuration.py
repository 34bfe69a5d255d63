"""What a bucket's configuration may hold, whoever sends it. Pure.

Gateways check what their clients send; this is the bound on what is stored, which every listing of
buckets, every gateway and every sweep has to carry.
"""

from __future__ import annotations

import msgspec

from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import (
    ACL_GRANTS_MAX,
    BUCKET_TAGS_MAX,
    CONFIGURATION_BYTES_MAX,
    LIFECYCLE_RULES_MAX,
    RULE_ID_CHARACTERS_MAX,
    RULE_PREFIX_BYTES_MAX,
    TAG_KEY_CHARACTERS_MAX,
    TAG_VALUE_CHARACTERS_MAX,
)
from objectcache_schemas.records import BucketConfiguration, LifecycleRule

_ENCODER = msgspec.msgpack.Encoder()


def check_configuration(configuration: BucketConfiguration) -> None:
    """Raise `InvalidRequest` naming what is over its limit."""
    _check("rules of configuration.lifecycle", len(configuration.lifecycle), LIFECYCLE_RULES_MAX)
    for rule in configuration.lifecycle:
        _check_rule(rule)
    _check("configuration.tags", len(configuration.tags), BUCKET_TAGS_MAX)
    for key, value in configuration.tags.items():
        _check("characters of a tag's key", len(key), TAG_KEY_CHARACTERS_MAX)
        _check("characters of a tag's value", len(value), TAG_VALUE_CHARACTERS_MAX)
    _check("grants of configuration.acl", len(configuration.acl), ACL_GRANTS_MAX)
    encoded_bytes = len(_ENCODER.encode(configuration))
    _check("bytes of the bucket's whole configuration", encoded_bytes, CONFIGURATION_BYTES_MAX)


def _check_rule(rule: LifecycleRule) -> None:
    _check("characters of a rule's ID", len(rule.rule_id), RULE_ID_CHARACTERS_MAX)
    _check("bytes of a rule's prefix", len(rule.prefix.encode()), RULE_PREFIX_BYTES_MAX)


def _check(what: str, count: int, count_max: int) -> None:
    if count > count_max:
        raise InvalidRequest(f"{what}: {count} are given, {count_max} are allowed")
