"""What answers mean to the client, hostile ones among them."""

from __future__ import annotations

import msgspec
import pytest

from objectcache.channel.error_xml import ERROR_BODY_BYTES_MAX, parse_error_fields
from objectcache.channel.responses import (
    parse_delivery_head,
    parse_error,
    parse_match,
    parse_outcome,
)
from objectcache.errors import (
    AccessDenied,
    Busy,
    Conflict,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    StorageFull,
    Unavailable,
    Unsupported,
)
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import ERRORS

ASKED = Descriptor(("k1", "k2", "k3"), 4, 16, 100)


def error_of(status: int, body: bytes, **headers: str) -> ObjectCacheError:
    return parse_error(status, headers.get, body)


def error_xml(code: str, extra: str = "") -> bytes:
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code>'
        f"<Message>about &lt;{code}&gt;</Message>{extra}<RequestId>r</RequestId></Error>"
    ).encode()


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_every_code_becomes_its_class(code: str) -> None:
    row = ERRORS[code]
    error = error_of(row.http_status, error_xml(code))
    assert type(error) is row.error_class
    assert (error.code, error.message) == (code, f"about <{code}>")


def test_details_come_from_elements_and_retry_after() -> None:
    missing = "<Key>a/b</Key><MissingIndex>17</MissingIndex>"
    error = error_of(404, error_xml("NoSuchKey", missing))
    assert (error.details.key, error.details.missing_index) == ("a/b", 17)
    busy = parse_error(503, {"retry-after": "2"}.get, error_xml("SlowDown"))
    assert isinstance(busy, Busy)
    assert busy.details.retry_after_s == 2.0
    assert parse_error(503, {"retry-after": "soon"}.get, b"").details.retry_after_s is None


@pytest.mark.parametrize(
    ("status", "error_class"),
    [
        (301, InvalidRequest),
        (400, InvalidRequest),
        (403, AccessDenied),
        (404, NotFound),
        (409, Conflict),
        (501, Unsupported),
        (503, Unavailable),
        (507, StorageFull),
        (502, ObjectCacheError),
    ],
)
def test_an_answer_without_an_s3_error_is_judged_by_its_status(
    status: int, error_class: type[ObjectCacheError]
) -> None:
    named = {"server": "nginx/1.27", "content-type": "text/html"}
    error = parse_error(status, named.get, b"<html>a proxy's page", "http://h:1")
    assert type(error) is error_class
    assert error.message == (
        f"HTTP status {status} without an S3 error: http://h:1 answered, but not as S3: a server "
        "that calls itself 'nginx/1.27' sent text/html; is the endpoint right?"
    )


def test_the_admin_api_is_known_by_its_header() -> None:
    named = {"x-objectcache-admin-api": "1", "server": "ObjectCache-admin"}
    error = parse_error(404, named.get, b'{"code": "NoSuchEntity"}', "http://h:9001")
    assert isinstance(error, InvalidRequest)
    assert error.message.startswith("http://h:9001 answered, but not as S3: it is ObjectCache's")


def test_who_has_no_name_and_sends_nothing_is_told_so() -> None:
    assert "has no name sent nothing" in error_of(404, b"").message
    assert "is a gateway of ObjectCache" in error_of(404, b"", server="ObjectCache").message


def test_an_unknown_code_is_told_and_judged_by_its_status() -> None:
    error = error_of(403, error_xml("FutureCode"))
    assert isinstance(error, AccessDenied)
    assert "FutureCode: about <FutureCode>" in error.message


def billion_laughs() -> bytes:
    entities = '<!ENTITY a0 "ha">' + "".join(
        f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 10)
    )
    return f"<!DOCTYPE e [{entities}]><Error><Code>&a9;</Code></Error>".encode()


@pytest.mark.parametrize(
    "document",
    [
        billion_laughs(),
        b'<!DOCTYPE e SYSTEM "http://127.0.0.1/x"><Error><Code>NoSuchKey</Code></Error>',
        b'<!DOCTYPE e [<!ENTITY x SYSTEM "file:///etc/passwd">]><Error><Code>&x;</Code></Error>',
        b"<Error><Code>NoSuchKey</Code>",
        b"<Error><Code>" + b"x" * ERROR_BODY_BYTES_MAX + b"</Code></Error>",
        b"\xff\xfe\x00",
        b"",
    ],
    ids=["entities", "dtd", "external", "truncated", "long", "noise", "empty"],
)
def test_hostile_xml_has_no_fields(document: bytes) -> None:
    assert parse_error_fields(document) == {}


def test_only_children_of_the_root_are_fields() -> None:
    document = b"<Error><Code>Outer</Code><Detail><Code>Inner</Code></Detail></Error>"
    assert parse_error_fields(document) == {"Code": "Outer"}


def head_of(**changes: str) -> dict[str, str]:
    return {
        "x-objectcache-delivery": "layerwise",
        "x-objectcache-chunk-count": "2",
        "x-objectcache-layer-bytes": "200",
        "x-objectcache-request-id": "r1",
    } | {f"x-objectcache-{name.replace('_', '-')}": value for name, value in changes.items()}


def test_an_accepted_get_is_described_by_its_headers() -> None:
    head = parse_delivery_head(head_of(delivery="chunkwise", rate="1000000").get, ASKED)
    assert (head.mode, head.chunk_count, head.request_id) == (DeliveryMode.CHUNKWISE, 2, "r1")
    assert head.rate_bytes_per_s == 1e6
    assert head.shape(ASKED).payload_bytes == 2 * 4 * 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"delivery": "auto"},
        {"chunk_count": "4"},
        {"chunk_count": "-1"},
        {"chunk_count": "two"},
        {"layer_bytes": "300"},
    ],
)
def test_headers_that_contradict_the_request_are_an_error(wrong: dict[str, str]) -> None:
    with pytest.raises(ObjectCacheError, match="the server sent"):
        parse_delivery_head(head_of(**wrong).get, ASKED)


def test_an_outcome_is_success_or_a_failure_with_its_layer() -> None:
    outcome: dict[str, object] = {"v": 1, "chunk_count": 2, "payload_bytes": 800}
    assert parse_outcome(msgspec.msgpack.encode(outcome)) is None
    failed = outcome | {"error_code": "DamagedData", "error_message": "rot", "failed_layer": 3}
    failure = parse_outcome(msgspec.msgpack.encode(failed))
    assert failure is not None
    assert (failure.message, failure.details.layer) == ("DamagedData: rot", 3)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"<Error/>", msgspec.msgpack.encode({"v": 1})])
def test_an_answer_that_makes_no_sense_is_an_error(body: bytes) -> None:
    with pytest.raises(ObjectCacheError, match="makes no sense"):
        parse_outcome(body)
    with pytest.raises(ObjectCacheError, match="makes no sense"):
        parse_match(body, 3)


def test_more_matches_than_keys_are_an_error() -> None:
    body = msgspec.msgpack.encode({"v": 1, "matched": 4})
    assert parse_match(body, 4) == 4
    with pytest.raises(ObjectCacheError, match="matched 4 of 3"):
        parse_match(body, 3)
