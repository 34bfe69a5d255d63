"""Lines of S3's server access log format."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from objectcache_gateway.audit.audit_line import (
    FIELD_COUNT,
    AuditEntry,
    audit_line,
    encoded_key,
    operation_name,
    request_uri,
    without_secrets,
)
from objectcache_gateway.request.routes import Operation

# AWS's own regular expression for these lines, field by field: a word, [time] or "quoted".
FIELD = re.compile(r'\[[^\]]*\]|"(?:[^"\\]|\\x[0-9A-F]{2})*"|[^ "]+')

ENTRY = AuditEntry(
    bucket_owner="alice",
    bucket="llama",
    time_unix_s=1549411238.75,
    remote_ip="192.0.2.3",
    requester="bob",
    request_id="3E57427F3E9D1A2B",
    operation=Operation.GET_OBJECT,
    method="GET",
    key="a b/ü+%",
    raw_path="/llama/a%20b/%C3%BC%2B%25",
    http_version="HTTP/1.1",
    status=206,
    error_code="",
    bytes_sent=113,
    object_bytes=4096,
    total_s=0.0449,
    turnaround_s=0.0116,
    referer="",
    user_agent="S3Console/0.4",
    version_id="",
    host_id="",
    is_signed=True,
    is_presigned=False,
    cipher_suite="TLS_AES_128_GCM_SHA256",
    host="llama.localhost:9000",
    tls_version="TLSv1.3",
)


def test_a_line_has_awss_26_fields_in_awss_order() -> None:
    assert audit_line(ENTRY) == (
        b"alice llama [06/Feb/2019:00:00:38 +0000] 192.0.2.3 bob 3E57427F3E9D1A2B "
        b"REST.GET.OBJECT a%2520b/%25C3%25BC%252B%2525 "
        b'"GET /llama/a%20b/%C3%BC%2B%25 HTTP/1.1" 206 - 113 4096 45 12 "-" "S3Console/0.4" - - '
        b"SigV4 TLS_AES_128_GCM_SHA256 AuthHeader llama.localhost:9000 TLSv1.3 - -\n"
    )
    assert len(FIELD.findall(audit_line(ENTRY).decode())) == FIELD_COUNT


def test_what_is_not_known_is_a_dash() -> None:
    unknown = replace(
        ENTRY,
        bucket_owner="",
        bucket="",
        remote_ip="",
        requester="",
        operation=None,
        key="",
        status=None,
        bytes_sent=0,
        object_bytes=None,
        turnaround_s=None,
        user_agent="",
        is_signed=False,
        cipher_suite="",
        host="",
        tls_version="",
    )
    fields = FIELD.findall(audit_line(unknown).decode().rstrip("\n"))
    others = {number for number, field in enumerate(fields) if field not in ("-", '"-"')}
    assert others == {2, 5, 8, 13}  # time, request id, Request-URI, total time


def test_a_presigned_request_keeps_its_query_but_not_what_proves_who_asked() -> None:
    query = (
        "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKID%2F2019&X-Amz-Date=20190206T000038Z"
        "&x-amz-signature=SECRET1&X-Amz-Security-Toke%6e=SECRET2&versionId=null"
    )
    presigned = replace(ENTRY, raw_path=f"/llama/a?{query}", is_presigned=True)
    line = audit_line(presigned).decode()
    assert "SECRET" not in line
    assert "AKID" not in line
    kept = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Date=20190206T000038Z&versionId=null"
    assert f'"GET /llama/a?{kept} HTTP/1.1"' in line
    assert " QueryString " in line


def test_a_presigned_url_in_a_header_loses_its_signature_too() -> None:
    url = "https://store/llama/a?X-Amz-Signature=SECRET&x=1"
    for entry in (replace(ENTRY, referer=url), replace(ENTRY, user_agent=url)):
        assert '"https://store/llama/a?x=1"' in audit_line(entry).decode()


def test_a_url_without_a_query_stays_as_it_is() -> None:
    assert without_secrets("/b/k") == "/b/k"
    assert without_secrets("/b?X-Amz-Signature=1") == "/b"
    assert without_secrets("/b?uploads&a=b?c") == "/b?uploads&a=b?c"


@pytest.mark.parametrize(
    ("operation", "method", "name"),
    [
        (Operation.PUT_OBJECT, "PUT", "REST.PUT.OBJECT"),
        (Operation.COPY_OBJECT, "PUT", "REST.COPY.OBJECT"),
        (Operation.UPLOAD_PART_COPY, "PUT", "REST.COPY.PART"),
        (Operation.CREATE_UPLOAD, "POST", "REST.POST.UPLOADS"),
        (Operation.LIST_PARTS, "GET", "REST.GET.UPLOAD"),
        (Operation.LIST_OBJECTS_V2, "GET", "REST.GET.BUCKET"),
        (Operation.DELETE_OBJECTS, "POST", "REST.POST.MULTI_OBJECT_DELETE"),
        (Operation.KV_GET, "POST", "REST.POST.KV_GET"),
        (None, "BREW", "-"),
    ],
)
def test_operations_have_awss_names(operation: Operation | None, method: str, name: str) -> None:
    assert operation_name(operation, method) == name


def test_every_operation_has_a_name_that_is_one_word() -> None:
    for operation in Operation:
        assert re.fullmatch(r"REST\.[A-Z]+\.[A-Z_0-9]+", operation_name(operation, "GET"))


def test_keys_are_encoded_twice() -> None:
    assert encoded_key('x "y"\n') == "x%2520%2522y%2522%250A"
    assert encoded_key("") == "-"


def test_a_request_line_cannot_end_its_field_or_the_log_line() -> None:
    uri = request_uri("GET", '/b/"\\\n\x00é\udcff', "HTTP/1.1")
    assert uri == '"GET /b/\\x22\\x5C\\x0A\\x00\\xC3\\xA9\\xFF HTTP/1.1"'


ANY_TEXT = st.text(st.characters(codec=None), max_size=40)


@given(
    *(ANY_TEXT for _ in range(6)),
    st.sampled_from([None, *Operation]),
)
def test_any_text_makes_one_line_of_26_fields(
    bucket: str,
    host: str,
    referer: str,
    user_agent: str,
    path: str,
    version_id: str,
    operation: Operation | None,
) -> None:
    texts = (
        text.encode("utf-8", "replace").decode("utf-8", "surrogateescape")
        for text in (bucket, host, referer, user_agent, path, version_id)
    )
    bucket, host, referer, user_agent, path, version_id = texts
    entry = replace(
        ENTRY,
        bucket=bucket,
        host=host,
        referer=referer,
        user_agent=user_agent,
        raw_path=path,
        version_id=version_id,
        operation=operation,
    )
    line = audit_line(entry).decode("ascii")
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    assert len(FIELD.findall(line[:-1])) == FIELD_COUNT
