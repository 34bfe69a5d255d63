"""What a bucket's configuration may hold, and how buckets are listed that hold as much."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

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
from objectcache_schemas.messages.buckets import Buckets, ListBuckets
from objectcache_schemas.messages.frames import MESSAGE_BYTES_MAX, encode_frame
from objectcache_schemas.records import (
    AclGrant,
    AclPermission,
    BucketConfiguration,
    BucketInfo,
    LifecycleRule,
)
from objectcache_storage_server.engines.base import BUCKET_PAGE, Engine
from objectcache_storage_server.engines.memory.engine import MemoryEngine
from objectcache_storage_server.s3.bucket_configuration import check_configuration
from objectcache_storage_server.s3.bucket_pages import PAGE_BYTES_MAX, bucket_page


def rules(count: int, prefix: str = "") -> BucketConfiguration:
    return BucketConfiguration(
        lifecycle=tuple(
            LifecycleRule(rule_id=str(number), prefix=prefix, expiration_days=1)
            for number in range(count)
        )
    )


def named(rule_id: str) -> BucketConfiguration:
    return BucketConfiguration(lifecycle=(LifecycleRule(rule_id=rule_id, expiration_days=1),))


def grants(count: int) -> BucketConfiguration:
    return BucketConfiguration(
        acl=tuple(AclGrant(f"user-{number}", AclPermission.READ) for number in range(count))
    )


def tags(count: int) -> BucketConfiguration:
    return BucketConfiguration(tags={str(number): "" for number in range(count)})


@pytest.mark.parametrize(
    ("most", "more", "what"),
    [
        (rules(LIFECYCLE_RULES_MAX), rules(LIFECYCLE_RULES_MAX + 1), "configuration.lifecycle"),
        (
            rules(1, "é" * (RULE_PREFIX_BYTES_MAX // 2)),
            rules(1, "é" * (RULE_PREFIX_BYTES_MAX // 2) + "e"),
            "a rule's prefix: 1025 are given",
        ),
        (named("i" * RULE_ID_CHARACTERS_MAX), named("i" * 256), "a rule's ID"),
        (tags(BUCKET_TAGS_MAX), tags(BUCKET_TAGS_MAX + 1), "configuration.tags"),
        (
            BucketConfiguration(tags={"k" * TAG_KEY_CHARACTERS_MAX: ""}),
            BucketConfiguration(tags={"k" * 129: ""}),
            "a tag's key",
        ),
        (
            BucketConfiguration(tags={"k": "v" * TAG_VALUE_CHARACTERS_MAX}),
            BucketConfiguration(tags={"k": "v" * 257}),
            "a tag's value",
        ),
        (grants(ACL_GRANTS_MAX), grants(ACL_GRANTS_MAX + 1), "configuration.acl"),
        (rules(240, "p" * 1024), rules(260, "p" * 1024), str(CONFIGURATION_BYTES_MAX)),
    ],
)
def test_each_part_and_the_whole_are_bounded(
    most: BucketConfiguration, more: BucketConfiguration, what: str
) -> None:
    check_configuration(most)
    with pytest.raises(InvalidRequest, match=what):
        check_configuration(more)


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = MemoryEngine()
    yield opened
    opened.close()


def fill(engine: Engine, count: int, configuration: BucketConfiguration) -> list[str]:
    names = [f"bucket-{number:04d}" for number in range(count)]
    for name in names:
        engine.create_bucket(BucketInfo(name=name, owner="o", region="r", created_s=0.0))
        engine.configure_bucket(name, configuration)
    return names


def pages(engine: Engine, request: ListBuckets) -> list[Buckets]:
    found = [bucket_page(engine, request)]
    while (after := found[-1].next_start_after) is not None:
        found.append(bucket_page(engine, msgspec.structs.replace(request, start_after=after)))
    return found


def test_no_page_of_buckets_is_near_the_limit_of_a_message(engine: Engine) -> None:
    names = fill(engine, 320, rules(240, "p" * 1024))
    listed = pages(engine, ListBuckets(with_configuration=True))
    sizes_bytes = [len(encode_frame(page)) for page in listed]
    assert sum(sizes_bytes) > MESSAGE_BYTES_MAX
    assert max(sizes_bytes) < PAGE_BYTES_MAX + CONFIGURATION_BYTES_MAX + 1024
    assert [info.name for page in listed for info in page.buckets] == names
    assert all(info.configuration.lifecycle for page in listed for info in page.buckets)


def test_configurations_are_left_out_unless_they_are_asked_for(engine: Engine) -> None:
    names = fill(engine, 3, rules(1))
    (page,) = pages(engine, ListBuckets())
    assert [info.name for info in page.buckets] == names
    assert all(info.configuration == BucketConfiguration() for info in page.buckets)


@pytest.mark.parametrize("limit", [1, BUCKET_PAGE - 1, BUCKET_PAGE, BUCKET_PAGE + 1, 1000])
def test_pages_have_at_most_as_many_buckets_as_asked_and_leave_none_out(
    engine: Engine, limit: int
) -> None:
    names = fill(engine, 2 * BUCKET_PAGE + 1, BucketConfiguration())
    listed = pages(engine, ListBuckets(limit=limit))
    assert max(len(page.buckets) for page in listed) == min(limit, len(names))
    assert [info.name for page in listed for info in page.buckets] == names
    assert [info.name for info in engine.each_bucket()] == names
