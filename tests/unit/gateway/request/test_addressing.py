"""Buckets and keys from hosts and paths."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.request.addressing import (
    Address,
    RequestTarget,
    check_authority,
    check_bucket_name,
    decode_key,
    resolve_address,
    split_target,
)
from objectcache_schemas.errors import InvalidRequest

DOMAINS = ("localhost", "s3.example.com")


@pytest.mark.parametrize(
    ("target", "split"),
    [
        ("/", RequestTarget("/", "")),
        ("/b/k?x=%2F&y", RequestTarget("/b/k", "x=%2F&y")),
        ("//k", RequestTarget("//k", "")),
        ("/b/k?a?b", RequestTarget("/b/k", "a?b")),
        ("http://h:1/b/k?x", RequestTarget("/b/k", "x", "h:1")),
        ("HTTP://h", RequestTarget("/", "", "h")),
        ("http://h?x", RequestTarget("/", "x", "h")),
    ],
)
def test_a_target_comes_apart(target: str, split: RequestTarget) -> None:
    assert split_target(target) == split


@pytest.mark.parametrize("target", ["*", "host:443", "", "ftp://h/b"])
def test_other_forms_of_target_are_refused(target: str) -> None:
    with pytest.raises(InvalidRequest):
        split_target(target)


def test_an_absolute_target_must_name_the_signed_host() -> None:
    check_authority(RequestTarget("/", "", "Host:1"), "host:1")
    check_authority(RequestTarget("/", ""), "anything")
    with pytest.raises(InvalidRequest):
        check_authority(RequestTarget("/", "", "other:1"), "host:1")


@pytest.mark.parametrize(
    ("path", "host", "address"),
    [
        ("/", "localhost:9000", Address()),
        ("/bbb", "localhost", Address("bbb")),
        ("/bbb/", "127.0.0.1:9000", Address("bbb")),
        ("/bbb/k", "unknown.example:1", Address("bbb", "k")),
        ("/bbb//k", "localhost", Address("bbb", "/k")),
        ("/bbb/a%2Fb/../c", "localhost", Address("bbb", "a/b/../c")),
        ("/bbb/a+b%20c%2B", "localhost", Address("bbb", "a+b c+")),
        ("/", "bbb.localhost:9000", Address("bbb")),
        ("/k/l", "BBB.localhost", Address("bbb", "k/l")),
        ("/k", "a.b-c.s3.example.com", Address("a.b-c", "k")),
        ("/bbb/k", "s3.example.com", Address("bbb", "k")),
        ("/bbb/k", "[::1]:9000", Address("bbb", "k")),
    ],
)
def test_host_and_path_name_a_bucket_and_a_key(path: str, host: str, address: Address) -> None:
    assert resolve_address(path, host, DOMAINS) == address


@pytest.mark.parametrize(
    "name",
    [
        "ab",
        "a" * 64,
        "Abc",
        "a_b",
        "-ab",
        "ab-",
        ".multipart",
        "a..b",
        "1.2.3.4",
        "xn--a",
        "b-s3alias",
        "a/b",
        "é" * 3,
    ],
)
def test_bucket_names_that_s3_forbids_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_bucket_name(name)
    assert caught.value.code == "InvalidBucketName"


@pytest.mark.parametrize("name", ["abc", "a" * 63, "a.b-c.1", "123"])
def test_bucket_names_that_s3_allows_are_allowed(name: str) -> None:
    check_bucket_name(name)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_every_key_survives_its_encoding_or_is_too_long(key: str) -> None:
    encoded = quote(key, safe="/~")
    if len(key.encode()) > 1024:
        with pytest.raises(InvalidRequest) as caught:
            decode_key(encoded)
        assert caught.value.code == "KeyTooLongError"
    else:
        assert decode_key(encoded) == key


@pytest.mark.parametrize("raw_key", ["%FF%FE", "a%00b", "\udcff"])
def test_bytes_that_are_no_key_are_refused(raw_key: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_key(raw_key)


def test_an_undecodable_key_is_not_taken_for_its_text() -> None:
    assert decode_key("%25FF") == "%FF"
