"""Which operation a request asks for, and what is refused."""

from __future__ import annotations

import pytest

from objectcache_gateway.handlers.operations import HANDLERS
from objectcache_gateway.refused_headers import check_headers, refuse_preflight
from objectcache_gateway.request.addressing import Address
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.routes import UNCONFIGURED, Operation, raise_unconfigured, route
from objectcache_schemas.errors import (
    ERRORS,
    InvalidRequest,
    NotFound,
    ObjectCacheError,
    Unsupported,
)

SERVICE, BUCKET, OBJECT = Address(), Address("bbb"), Address("bbb", "k")


def routed(
    method: str, address: Address, query: str = "", headers: frozenset[str] = frozenset()
) -> Operation:
    pairs = {part.partition("=")[0]: part.partition("=")[2] for part in query.split("&") if part}
    return route(method, address, pairs, headers)


@pytest.mark.parametrize(
    ("method", "address", "query", "operation"),
    [
        ("GET", SERVICE, "", Operation.LIST_BUCKETS),
        ("POST", SERVICE, "kv-session", Operation.CREATE_SESSION),
        ("GET", BUCKET, "", Operation.LIST_OBJECTS_V1),
        ("GET", BUCKET, "prefix=a&marker=b&max-keys=3", Operation.LIST_OBJECTS_V1),
        ("GET", BUCKET, "list-type=2&prefix=a&start-after=b", Operation.LIST_OBJECTS_V2),
        ("GET", BUCKET, "versions&key-marker=", Operation.LIST_OBJECT_VERSIONS),
        ("GET", BUCKET, "uploads=&prefix=a", Operation.LIST_UPLOADS),
        ("GET", BUCKET, "policy", Operation.GET_UNCONFIGURED),
        ("POST", BUCKET, "delete=", Operation.DELETE_OBJECTS),
        ("POST", BUCKET, "kv-put", Operation.KV_PUT),
        ("PUT", OBJECT, "x-id=PutObject", Operation.PUT_OBJECT),
        ("GET", OBJECT, "partNumber=1", Operation.GET_OBJECT),
        ("GET", OBJECT, "response-content-type=a", Operation.GET_OBJECT),
        ("GET", OBJECT, "X-Amz-Signature=0&X-Amz-Expires=1&x-id=GetObject", Operation.GET_OBJECT),
        ("HEAD", OBJECT, "versionId=null", Operation.HEAD_OBJECT),
        ("PUT", OBJECT, "partNumber=1&uploadId=u", Operation.UPLOAD_PART),
        ("GET", OBJECT, "uploadId=u&max-parts=2", Operation.LIST_PARTS),
        ("DELETE", OBJECT, "uploadId=u", Operation.ABORT_UPLOAD),
        ("POST", OBJECT, "uploads", Operation.CREATE_UPLOAD),
        ("POST", OBJECT, "uploadId=u", Operation.COMPLETE_UPLOAD),
    ],
)
def test_a_request_finds_its_operation(
    method: str, address: Address, query: str, operation: Operation
) -> None:
    assert routed(method, address, query) is operation


def test_headers_turn_a_put_into_a_copy_and_a_get_into_a_delivery() -> None:
    copy = frozenset({"x-amz-copy-source"})
    assert routed("PUT", OBJECT, "", copy) is Operation.COPY_OBJECT
    assert routed("PUT", OBJECT, "partNumber=1&uploadId=u", copy) is Operation.UPLOAD_PART_COPY
    descriptor = frozenset({"x-objectcache-descriptor"})
    assert routed("GET", OBJECT, "", descriptor) is Operation.KV_GET_BY_KEY
    assert routed("GET", BUCKET, "", descriptor) is Operation.LIST_OBJECTS_V1


@pytest.mark.parametrize(
    ("method", "address", "query"),
    [
        ("PUT", OBJECT, "retention"),
        ("PUT", OBJECT, "retention&x-id=PutObjectRetention"),
        ("PUT", OBJECT, "legal-hold"),
        ("PUT", OBJECT, "partNumber=1"),
        ("PUT", BUCKET, "policy"),
        ("DELETE", BUCKET, "policy"),
        ("DELETE", BUCKET, "cors"),
        ("POST", BUCKET, ""),
        ("POST", OBJECT, ""),
        ("POST", OBJECT, "select&select-type=2"),
        ("GET", OBJECT, "torrent"),
        ("GET", BUCKET, "list-type=2&frobnicate"),
        ("GET", BUCKET, "policy&acl"),
        ("PUT", OBJECT, "x-amz-server-side-encryption=AES256"),
        ("PUT", SERVICE, ""),
        ("OPTIONS", OBJECT, ""),
    ],
)
def test_what_is_not_served_is_not_implemented(method: str, address: Address, query: str) -> None:
    with pytest.raises(Unsupported):
        routed(method, address, query)


def test_a_method_that_s3_does_not_have_is_not_allowed() -> None:
    with pytest.raises(InvalidRequest) as caught:
        routed("PATCH", OBJECT)
    assert caught.value.code == "MethodNotAllowed"


def test_every_operation_has_a_handler_and_every_configuration_a_code() -> None:
    assert set(HANDLERS) == set(Operation)
    assert set(UNCONFIGURED.values()) <= set(ERRORS)
    with pytest.raises(NotFound) as caught:
        raise_unconfigured({"x-id": "", "cors": ""})
    assert caught.value.code == "NoSuchCORSConfiguration"


def refused(name: str, value: str, operation: Operation = Operation.PUT_OBJECT) -> str | None:
    head = RequestHead("PUT", "/bbb/k", "", ((name, value),))
    try:
        check_headers(head, operation)
    except ObjectCacheError as error:
        return error.code if name in error.message else "the message does not name the header"
    return None


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("x-amz-server-side-encryption", "AES256", "NotImplemented"),
        ("x-amz-server-side-encryption-customer-key", "a", "NotImplemented"),
        ("x-amz-copy-source-server-side-encryption-customer-key", "a", "NotImplemented"),
        ("x-amz-object-lock-legal-hold", "ON", "NotImplemented"),
        ("x-amz-bucket-object-lock-enabled", "true", "NotImplemented"),
        ("x-amz-bucket-object-lock-enabled", "false", None),
        ("x-amz-acl", "private", None),
        ("x-amz-acl", "public-read", "NotImplemented"),
        ("x-amz-acl", "public-ready", "InvalidArgument"),
        ("x-amz-grant-read", "id=1", "NotImplemented"),
        ("x-amz-storage-class", "STANDARD", None),
        ("x-amz-storage-class", "GLACIER", "InvalidStorageClass"),
        ("x-amz-bypass-governance-retention", "true", None),
        ("x-amz-meta-object-lock-mode", "free text", None),
        ("if-match", "a", None),
    ],
)
def test_headers_are_refused_by_what_they_ask_for(name: str, value: str, code: str | None) -> None:
    assert refused(name, value) == code


def test_a_conditional_delete_is_refused() -> None:
    assert refused("if-match", "a", Operation.DELETE_OBJECT) == "NotImplemented"


@pytest.mark.parametrize(
    ("operation", "value", "code"),
    [
        (Operation.PUT_OBJECT, "public-read", None),
        (Operation.CREATE_BUCKET, "authenticated-read", None),
        (Operation.PUT_OBJECT, "public-ready", "InvalidArgument"),
        (Operation.COMPLETE_UPLOAD, "public-read", "NotImplemented"),
    ],
)
def test_a_canned_list_is_taken_where_lists_are_honoured(
    operation: Operation, value: str, code: str | None
) -> None:
    head = RequestHead("PUT", "/bbb/k", "", (("x-amz-acl", value),))
    if code is None:
        check_headers(head, operation, acls=True)
        return
    with pytest.raises(ObjectCacheError) as caught:
        check_headers(head, operation, acls=True)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("named", "code"),
    [
        ({}, "InvalidRequest"),
        ({"origin": "https://a.example"}, "InvalidRequest"),
        ({"origin": "https://a.example", "access-control-request-method": "PUT"}, "AccessDenied"),
    ],
)
def test_a_browser_that_asks_for_another_origin_is_denied(named: dict[str, str], code: str) -> None:
    with pytest.raises(ObjectCacheError) as caught:
        refuse_preflight(named.get)
    assert caught.value.code == code
