"""S3's XML, rendered and parsed."""

from __future__ import annotations

from urllib.parse import unquote
from xml.etree.ElementTree import fromstring

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.xml import xml_parse, xml_render
from objectcache_gateway.xml.xml_parse import CompletedPart, DeleteEntry
from objectcache_schemas.errors import InvalidRequest, NotFound
from objectcache_schemas.records import ObjectInfo

NAMESPACE = xml_render.NAMESPACE
PRINTABLE = st.text(
    st.characters(min_codepoint=32, exclude_characters="\ufffe\uffff", exclude_categories=["Cs"])
)


@given(PRINTABLE)
def test_text_survives_rendering_and_parsing(text: str) -> None:
    document = xml_render.document("Root", xml_render.element("Text", text))
    assert fromstring(document).findtext("{*}Text") == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_encoded_key_is_plain_text_that_decodes_to_it(key: str) -> None:
    encoded = xml_render.url_encoded(key)
    assert encoded.isascii()
    assert unquote(encoded) == key
    assert xml_render.escape(encoded) == encoded


def test_control_characters_become_references() -> None:
    assert xml_render.escape("a\x01\r\n\ufffe") == "a&#x1;&#xd;&#xa;&#xfffe;"


def test_an_error_names_its_request_and_the_missing_index() -> None:
    error = NotFound("chunk_keys[3] is <absent>", missing_index=3)
    root = fromstring(xml_render.error_document(error, "/b/k", "ID"))
    found = {child.tag: child.text for child in root}
    assert found == {
        "Code": "NoSuchKey",
        "Message": "chunk_keys[3] is <absent>",
        "Resource": "/b/k",
        "MissingIndex": "3",
        "RequestId": "ID",
    }
    plain = fromstring(xml_render.error_document(NotFound("no"), "/b/k", "ID"))
    assert plain.find("MissingIndex") is None


def test_a_resource_that_is_not_utf8_leaves_the_document_readable() -> None:
    document = xml_render.error_document(NotFound("no"), "/b/\udcff", "ID")
    assert fromstring(document).findtext("Resource") == "/b/?"


def test_times_have_milliseconds_and_a_z() -> None:
    assert xml_render.timestamp(0) == "1970-01-01T00:00:00.000Z"
    assert xml_render.timestamp(1700000000.5) == "2023-11-14T22:13:20.500Z"


def test_an_object_is_listed_with_a_quoted_etag() -> None:
    info = ObjectInfo(key="k", size_bytes=5, etag="abc", modified_s=0)
    entry = fromstring(xml_render.object_entry(info, "k", None, version=False))
    assert entry.findtext("ETag") == '"abc"'
    assert entry.find("Owner") is None
    version = fromstring(xml_render.object_entry(info, "k", "root", version=True))
    assert (version.tag, version.findtext("VersionId")) == ("Version", "null")
    assert version.findtext("Owner/ID") == "root"


@pytest.mark.parametrize("namespace", ["", f' xmlns="{NAMESPACE}"'])
def test_bodies_are_read_with_and_without_a_namespace(namespace: str) -> None:
    body = (
        f"<Delete{namespace}><Quiet>true</Quiet><Object><Key>a&amp;b</Key></Object>"
        "<Object><Key>c</Key><VersionId>null</VersionId></Object></Delete>"
    )
    assert xml_parse.parse_delete(body.encode()) == (
        [DeleteEntry("a&b"), DeleteEntry("c", "null")],
        True,
    )
    body = (
        f"<CompleteMultipartUpload{namespace}>"
        '<Part><PartNumber>1</PartNumber><ETag>"e1"</ETag><ChecksumCRC32>x</ChecksumCRC32></Part>'
        "<Part><ETag>e2</ETag><PartNumber>7</PartNumber></Part></CompleteMultipartUpload>"
    )
    assert xml_parse.parse_complete(body.encode()) == [
        CompletedPart(1, "e1", {"crc32": "x"}),
        CompletedPart(7, "e2", {}),
    ]
    body = (
        f"<CreateBucketConfiguration{namespace}><LocationConstraint>eu</LocationConstraint>"
        "</CreateBucketConfiguration>"
    )
    assert xml_parse.parse_location(body.encode()) == "eu"


def test_a_bucket_without_a_body_has_no_location_constraint() -> None:
    assert xml_parse.parse_location(b"") == ""
    assert xml_parse.parse_location(b"<CreateBucketConfiguration/>") == ""


BOMB = (
    b'<!DOCTYPE d [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]>'
    b"<Delete><Object><Key>&b;</Key></Object></Delete>"
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"<Delete>",
        b"<delete><Object><Key>k</Key></Object></delete>",
        b"<Delete><Object/></Delete>",
        b"<Delete><Object><Key></Key></Object></Delete>",
        b"<Delete>" + b"<Object><Key>k</Key></Object>" * 1001 + b"</Delete>",
        b'<?xml version="1.0" encoding="nonsense"?><Delete/>',
        b"<a>" * 100_000,
        BOMB,
    ],
)
def test_a_delete_that_is_none_is_malformed(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        xml_parse.parse_delete(body)
    assert caught.value.code == "MalformedXML"


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ("", "MalformedXML"),
        ("<Part><PartNumber>x</PartNumber><ETag>e</ETag></Part>", "MalformedXML"),
        ("<Part><PartNumber>-1</PartNumber><ETag>e</ETag></Part>", "MalformedXML"),
        ("<Part><PartNumber>1</PartNumber></Part>", "MalformedXML"),
        (
            "<Part><PartNumber>2</PartNumber><ETag>e</ETag></Part>"
            "<Part><PartNumber>1</PartNumber><ETag>e</ETag></Part>",
            "InvalidPartOrder",
        ),
    ],
)
def test_a_completion_that_is_none_is_refused(parts: str, code: str) -> None:
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>"
    with pytest.raises(InvalidRequest) as caught:
        xml_parse.parse_complete(body.encode())
    assert caught.value.code == code


def test_the_last_entry_of_a_part_that_was_sent_again_counts() -> None:
    entries = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>"
        for number, etag in ((1, "a"), (2, "b"), (2, "c"), (3, "d"))
    )
    body = f"<CompleteMultipartUpload>{entries}</CompleteMultipartUpload>"
    parts = xml_parse.parse_complete(body.encode())
    assert [(part.part_number, part.etag) for part in parts] == [(1, "a"), (2, "c"), (3, "d")]
