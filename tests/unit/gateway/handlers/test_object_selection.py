"""What a GET or HEAD answers with, and what a request stores beside an object's bytes."""

from __future__ import annotations

import pytest

from objectcache_gateway.handlers.objects.copy_objects import copied_attributes, copy_source
from objectcache_gateway.handlers.objects.object_headers import (
    attributes_of,
    object_headers,
    overrides,
)
from objectcache_gateway.handlers.objects.objects import part_number, select
from objectcache_gateway.request.addressing import Address
from objectcache_gateway.request.request_head import RequestHead
from objectcache_schemas.errors import InvalidRequest, PreconditionFailed
from objectcache_schemas.records import ObjectAttributes, ObjectInfo

CHECKSUMS = {"crc32": "AAAAAA=="}
WHOLE = ObjectInfo(
    key="k",
    size_bytes=100,
    etag="abc",
    modified_s=1_700_000_000.9,
    attributes=ObjectAttributes(checksums=CHECKSUMS, checksum_type="FULL_OBJECT"),
)
PARTS = ObjectInfo(
    key="k",
    size_bytes=100,
    etag="abc-2",
    modified_s=0,
    attributes=ObjectAttributes(part_sizes_bytes=(60, 40)),
)
EMPTY = ObjectInfo(key="k", size_bytes=0, etag="e", modified_s=0)


def head(**headers: str) -> RequestHead:
    pairs = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return RequestHead("GET", "/b/k", "", pairs)


def test_a_whole_object_shows_its_checksums_only_when_asked() -> None:
    plain = select(head(), {}, WHOLE)
    assert (plain.status, plain.offset_bytes, plain.length_bytes) == (200, 0, 100)
    assert "x-amz-checksum-crc32" not in plain.headers
    asked = select(head(x_amz_checksum_mode="ENABLED"), {}, WHOLE)
    assert asked.headers["x-amz-checksum-crc32"] == CHECKSUMS["crc32"]
    ranged = select(head(x_amz_checksum_mode="ENABLED", range="bytes=0-99"), {}, WHOLE)
    assert ranged.status == 206
    assert "x-amz-checksum-crc32" not in ranged.headers


def test_if_range_serves_the_whole_object_once_it_has_changed() -> None:
    assert select(head(range="bytes=0-1", if_range='"abc"'), {}, WHOLE).status == 206
    assert select(head(range="bytes=0-1", if_range='"old"'), {}, WHOLE).status == 200


def test_conditions_come_before_ranges() -> None:
    assert select(head(range="bytes=500-", if_none_match='"abc"'), {}, WHOLE).status == 304
    with pytest.raises(PreconditionFailed):
        select(head(range="bytes=500-", if_match='"old"'), {}, WHOLE)


@pytest.mark.parametrize(
    ("info", "number", "status", "offset_bytes", "length_bytes"),
    [
        (PARTS, "1", 206, 0, 60),
        (PARTS, "2", 206, 60, 40),
        (WHOLE, "1", 206, 0, 100),
        (EMPTY, "1", 200, 0, 0),
    ],
)
def test_a_part_number_selects_that_part(
    info: ObjectInfo, number: str, status: int, offset_bytes: int, length_bytes: int
) -> None:
    found = select(head(), {"partNumber": number}, info)
    assert (found.status, found.offset_bytes, found.length_bytes) == (
        status,
        offset_bytes,
        length_bytes,
    )
    assert found.headers.get("x-amz-mp-parts-count") == ("2" if info is PARTS else None)


@pytest.mark.parametrize("info", [PARTS, WHOLE, EMPTY])
def test_a_part_that_the_object_does_not_have_is_outside(info: ObjectInfo) -> None:
    with pytest.raises(InvalidRequest) as caught:
        select(head(), {"partNumber": "3"}, info)
    assert caught.value.code == "InvalidPart"


@pytest.mark.parametrize("text", ["0", "10001", "-1", "x", "", "²"])
def test_part_numbers_are_from_one_to_ten_thousand(text: str) -> None:
    with pytest.raises(InvalidRequest):
        part_number(text)
    assert part_number("10000") == 10_000


def test_a_range_and_a_part_number_do_not_go_together() -> None:
    with pytest.raises(InvalidRequest):
        select(head(range="bytes=0-1"), {"partNumber": "1"}, PARTS)


def test_headers_become_attributes_and_headers_again() -> None:
    attributes = attributes_of(
        head(content_type="a/b", content_encoding="aws-chunked, zstd", x_amz_meta_rank="ü")
    )
    assert attributes.content_encoding == "zstd"
    info = ObjectInfo(key="k", size_bytes=1, etag="e", modified_s=1.9, attributes=attributes)
    shown = object_headers(info)
    assert shown["Last-Modified"] == "Thu, 01 Jan 1970 00:00:01 GMT"
    assert (shown["Content-Type"], shown["Content-Encoding"]) == ("a/b", "zstd")
    assert shown["x-amz-meta-rank"] == "ü"


def test_metadata_is_bounded_and_must_be_utf8() -> None:
    attributes_of(head(x_amz_meta_a="x" * 2047))
    with pytest.raises(InvalidRequest) as caught:
        attributes_of(head(x_amz_meta_a="x" * 2048))
    assert caught.value.code == "MetadataTooLarge"
    with pytest.raises(InvalidRequest, match="x-amz-meta-a"):
        attributes_of(head(x_amz_meta_a="\udcff"))


def test_an_override_cannot_split_the_response() -> None:
    assert overrides({"response-expires": "soon"}) == {"Expires": "soon"}
    with pytest.raises(InvalidRequest):
        overrides({"response-content-type": "a\r\nSet-Cookie: b"})


@pytest.mark.parametrize(
    ("header", "address"),
    [
        ("/bbb/k", Address("bbb", "k")),
        ("bbb/a%2Fb%20%2B+", Address("bbb", "a/b + ")),
        ("bbb%2Fk", Address("bbb", "k")),
        ("/bbb//k?versionId=null", Address("bbb", "/k")),
        ("/bbb/what%3FversionId=7", Address("bbb", "what?versionId=7")),
    ],
)
def test_a_copy_source_names_a_bucket_and_a_key(header: str, address: Address) -> None:
    assert copy_source(header) == address


@pytest.mark.parametrize(
    "header", ["", "/", "bbb", "bbb/", "/B_/k", "bbb/%FF", "bbb/k?versionId=7"]
)
def test_a_copy_source_that_names_nothing_is_refused(header: str) -> None:
    with pytest.raises(InvalidRequest):
        copy_source(header)


def test_a_copy_keeps_checksums_of_the_whole_and_forgets_parts() -> None:
    assert copied_attributes(head(), WHOLE).checksums == CHECKSUMS
    assert copied_attributes(head(), PARTS).part_sizes_bytes == ()
    replaced = copied_attributes(
        head(x_amz_metadata_directive="REPLACE", content_type="a/b"), WHOLE
    )
    assert (replaced.content_type, replaced.checksums) == ("a/b", CHECKSUMS)
    with pytest.raises(InvalidRequest):
        copied_attributes(head(x_amz_metadata_directive="MOVE"), WHOLE)
