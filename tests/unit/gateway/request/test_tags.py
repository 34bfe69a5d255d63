"""Tags as headers and XML bring them."""

from __future__ import annotations

import pytest

from objectcache_gateway.request.tags import (
    OBJECT_TAGS_MAX,
    checked_tags,
    parse_tagging,
    tags_of_header,
)
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import BUCKET_TAGS_MAX
from tests.unit.gateway.request_signing import make_head


def of_header(text: str) -> dict[str, str]:
    return tags_of_header(make_head("PUT", "/b/k", {"x-amz-tagging": text}))


def tagging(*pairs: tuple[str, str]) -> bytes:
    tags = "".join(f"<Tag><Key>{key}</Key><Value>{value}</Value></Tag>" for key, value in pairs)
    return f"<Tagging><TagSet>{tags}</TagSet></Tagging>".encode()


def code_of(text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        of_header(text)
    return caught.value.code


def test_a_header_is_a_query_and_its_tags_are_shown_by_key() -> None:
    assert of_header("foo=bar&bar") == {"bar": "", "foo": "bar"}
    assert list(of_header("b=1&a=2")) == ["a", "b"]
    assert of_header("k%20ey+x=%C3%A4%3D%2F") == {"k ey x": "ä=/"}
    assert of_header("a=b=c") == {"a": "b=c"}
    assert tags_of_header(make_head("PUT", "/b/k")) == {}


@pytest.mark.parametrize(
    "text",
    [
        "a=1&a=2",
        "=value",
        "aws:system=1",
        "AWS:system=1",
        f"{'k' * 129}=v",
        f"k={'v' * 257}",
        "k=a%00b",
        "k%3C=v",
        "&".join(f"k{number}=v" for number in range(OBJECT_TAGS_MAX + 1)),
    ],
)
def test_tags_that_s3_does_not_allow_are_refused(text: str) -> None:
    assert code_of(text) == "InvalidTag"


def test_limits_are_of_characters_and_include_their_ends() -> None:
    tags = of_header(f"{'ä' * 128}={'ö' * 256}")
    assert tags == {"ä" * 128: "ö" * 256}
    assert len(checked_tags([(str(n), "") for n in range(50)], BUCKET_TAGS_MAX)) == 50
    with pytest.raises(InvalidRequest):
        checked_tags([(str(n), "") for n in range(51)], BUCKET_TAGS_MAX)


def test_a_header_that_is_not_utf8_is_refused() -> None:
    assert code_of("k=%FF") == "InvalidArgument"


def test_a_document_names_tags_with_and_without_a_namespace() -> None:
    assert parse_tagging(tagging(("b", "2"), ("a", "")), 10) == {"a": "", "b": "2"}
    body = tagging(("a", "1")).replace(b"<Tagging>", b'<Tagging xmlns="http://s3/doc">')
    assert parse_tagging(body, 10) == {"a": "1"}
    assert parse_tagging(b"<Tagging><TagSet/></Tagging>", 10) == {}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<Tagging/>",
        b"<Other><TagSet/></Other>",
        b"<Tagging><TagSet/><TagSet/></Tagging>",
        b"<Tagging><TagSet><Tag><Key>a</Key></Tag></TagSet></Tagging>",
        b"<Tagging><TagSet><Tag><Value>a</Value></Tag></TagSet></Tagging>",
        b'<!DOCTYPE a [<!ENTITY x "y">]><Tagging><TagSet/></Tagging>',
    ],
)
def test_another_document_is_malformed(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_tagging(body, 10)
    assert caught.value.code == "MalformedXML"
