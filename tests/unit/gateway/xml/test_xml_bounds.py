"""What a hostile XML body may cost, and where a large one is read."""

from __future__ import annotations

import asyncio
import threading

import pytest

from objectcache_gateway.xml.xml_tree import (
    ATTRIBUTES_MAX,
    DEPTH_MAX,
    ELEMENTS_MAX,
    TAG_BYTES_MAX,
    THREAD_BYTES_MIN,
    parse_apart,
    root_of,
)
from objectcache_schemas.errors import InvalidRequest


def refusal(body: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        root_of(body, "a")
    assert caught.value.code == "MalformedXML"
    return caught.value.message


def attributes(count: int) -> bytes:
    return b"<a " + b" ".join(b"x%d=''" % number for number in range(count)) + b"/>"


def test_elements_are_bounded() -> None:
    body = b"<a>" + b"<b/>" * (ELEMENTS_MAX - 1) + b"</a>"
    assert len(root_of(body, "a")) == ELEMENTS_MAX - 1
    assert "10000 elements" in refusal(body.replace(b"</a>", b"<b/></a>"))
    assert len(root_of(body.replace(b"</a>", b"<b/></a>"), "a", ELEMENTS_MAX + 1)) == ELEMENTS_MAX


def test_what_follows_the_last_allowed_element_is_not_read() -> None:
    assert "elements" in refusal(b"<a>" + b"<b/>" * 500_000 + b"this is no XML at all &<")


def test_depth_is_bounded() -> None:
    root_of(b"<a>" * DEPTH_MAX + b"</a>" * DEPTH_MAX, "a")
    assert "deeper than 16" in refusal(b"<a>" * (DEPTH_MAX + 1) + b"</a>" * (DEPTH_MAX + 1))


def test_attributes_of_an_element_and_the_bytes_of_a_tag_are_bounded() -> None:
    root_of(attributes(ATTRIBUTES_MAX), "a")
    assert "attributes" in refusal(attributes(ATTRIBUTES_MAX + 1))
    assert "tag of over" in refusal(b"<a x='" + b"y" * (2 * TAG_BYTES_MAX) + b"'/>")


@pytest.mark.parametrize("doctype", [b"<!DOCTYPE a>", b'<!DOCTYPE a SYSTEM "file:///etc/passwd">'])
def test_a_document_type_is_refused(doctype: bytes) -> None:
    assert "document type" in refusal(doctype + b"<a/>")


def test_an_entity_that_nobody_declared_is_refused() -> None:
    assert "a document" in refusal(b"<a>&b;</a>")


@pytest.mark.parametrize(
    "body",
    [
        b"<a><b>x&amp;&#x79;<![CDATA[<z>]]></b><b>second</b></a>",
        b'<n:a xmlns:n="urn:n"><n:b>x&amp;y&lt;z&gt;</n:b></n:a>',
        '<?xml version="1.0" encoding="utf-16"?><a><b>x&amp;y&lt;z&gt;</b></a>'.encode("utf-16"),
        b"<a><!-- no text --><?no text?><b>x&amp;y<!-- nor here -->&lt;z></b></a>",
    ],
)
def test_text_is_read_whatever_way_it_is_written(body: bytes) -> None:
    assert root_of(body, "a").findtext("b") == "x&y<z>"


def test_text_longer_than_what_is_read_at_once_is_whole() -> None:
    long = "é" * 100_000
    assert root_of(f"<a><b>{long}</b></a>".encode(), "a").findtext("b") == long


@pytest.mark.asyncio
async def test_one_thread_reads_all_large_bodies_and_the_loop_small_ones() -> None:
    def reader(_: bytes) -> str:
        return threading.current_thread().name

    here = threading.current_thread().name
    assert await parse_apart(reader, b"x" * (THREAD_BYTES_MIN - 1)) == here
    large = b"x" * THREAD_BYTES_MIN
    names = set(await asyncio.gather(*[parse_apart(reader, large) for _ in range(8)]))
    assert names == {"objectcache-xml_0"}


@pytest.mark.asyncio
async def test_what_a_large_body_is_refused_with_reaches_who_asked() -> None:
    body = b"<a>" + b"<b/>" * ELEMENTS_MAX + b"</a>"
    with pytest.raises(InvalidRequest, match="elements"):
        await parse_apart(lambda data: root_of(data, "a"), body)
