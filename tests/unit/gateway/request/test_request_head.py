from __future__ import annotations

import pytest

from objectcache_gateway.request.request_head import RequestHead, wire_bytes
from objectcache_schemas.errors import InvalidRequest
from tests.unit.gateway.request_signing import make_head


def test_duplicate_headers_are_joined_and_missing_ones_are_none() -> None:
    head = make_head("GET", "/", [("A", "1"), ("b", "2"), ("a", " 3")])
    assert head.header("a") == "1, 3"
    assert head.header("c") is None


def test_the_query_is_decoded_but_a_plus_stays_a_plus() -> None:
    head = make_head("GET", "/?prefix=a+b%20c%2F&delete&&empty=&prefix=2&x=a=b")
    assert head.query == (
        ("prefix", "a+b c/"),
        ("delete", ""),
        ("empty", ""),
        ("prefix", "2"),
        ("x", "a=b"),
    )


@pytest.mark.parametrize("query", ["a=%FF", "%C3=1", "a=\udcff", "a=%ED%A0%80"])
def test_a_query_that_is_not_utf8_is_refused(query: str) -> None:
    with pytest.raises(InvalidRequest, match="UTF-8"):
        _ = make_head("GET", f"/?{query}").query


def test_bytes_that_are_not_utf8_come_back_as_they_were() -> None:
    data = b"caf\xc3\xa9 \xff"
    assert wire_bytes(data.decode("utf-8", "surrogateescape")) == data


def test_heads_that_say_the_same_are_equal_whatever_was_asked_of_them() -> None:
    heads = [RequestHead("GET", "/", "a=1", (("host", "h"),)) for _ in range(2)]
    assert heads[0].query == (("a", "1"),)
    assert heads[0].header("host") == "h"
    assert heads[0] == heads[1]
    assert hash(heads[0]) == hash(heads[1])
    assert "_by_name" not in repr(heads[0])
