"""What a request's headers ask of RDMA, and which of them would lose bytes if they were let by."""

from __future__ import annotations

import pytest

from objectcache_gateway.request.rdma_request import asked_rdma, decline_headers, declines_write
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.routes import Operation
from objectcache_schemas.errors import AccessDenied, InvalidRequest, ObjectCacheError, Unsupported
from tests.cuobject_client import cuobject_token

TOKEN = cuobject_token(4096, 1 << 20)
EMPTY_PUT = {"content-length": "0", "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
WRITES = (Operation.PUT_OBJECT, Operation.UPLOAD_PART)


def head(**headers: str) -> RequestHead:
    pairs = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return RequestHead("PUT", "/b/k", "", pairs)


def named(headers: dict[str, str]) -> RequestHead:
    return head(**headers)


def refused(headers: dict[str, str], operation: Operation) -> ObjectCacheError:
    with pytest.raises(ObjectCacheError) as caught:
        asked_rdma(named(headers), operation, is_signed=True)
    assert TOKEN not in caught.value.message
    return caught.value


@pytest.mark.parametrize("operation", WRITES)
@pytest.mark.parametrize("payload_hash", ["UNSIGNED-PAYLOAD", EMPTY_SHA256])
def test_a_write_with_a_token_and_no_body_is_one_to_decline(
    operation: Operation, payload_hash: str
) -> None:
    headers = {**EMPTY_PUT, "x-amz-rdma-token": TOKEN, "x-amz-content-sha256": payload_hash}
    token = asked_rdma(named(headers), operation, is_signed=True)
    assert token is not None
    assert token.size_bytes == 1 << 20
    assert declines_write(operation)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"content-length": "1"}, "empty body"),
        ({"content-length": "00"}, "empty body"),
        ({"transfer-encoding": "chunked"}, "empty body"),
        ({"x-amz-content-sha256": "a" * 64}, "UNSIGNED-PAYLOAD"),
        ({"x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}, "UNSIGNED-PAYLOAD"),
        ({"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="}, "Content-MD5"),
    ],
)
@pytest.mark.parametrize("operation", WRITES)
def test_a_write_with_a_token_that_speaks_of_a_body_is_refused(
    operation: Operation, change: dict[str, str], word: str
) -> None:
    error = refused({**EMPTY_PUT, "x-amz-rdma-token": TOKEN, **change}, operation)
    assert (type(error), error.code) == (InvalidRequest, "InvalidRequest")
    assert word in error.message


def test_a_write_with_a_token_says_how_long_its_body_is() -> None:
    error = refused({"x-amz-rdma-token": TOKEN}, Operation.PUT_OBJECT)
    assert "Content-Length: 0" in error.message


@pytest.mark.parametrize("operation", [*WRITES, Operation.GET_OBJECT, Operation.HEAD_OBJECT])
def test_a_bad_token_is_refused_wherever_it_would_be_used(operation: Operation) -> None:
    error = refused({**EMPTY_PUT, "x-amz-rdma-token": "junk"}, operation)
    assert error.code == "InvalidRDMAToken"


@pytest.mark.parametrize("operation", [*WRITES, Operation.GET_OBJECT, Operation.HEAD_OBJECT])
def test_a_token_that_nobody_signed_is_denied(operation: Operation) -> None:
    headers = named({**EMPTY_PUT, "x-amz-rdma-token": TOKEN})
    with pytest.raises(AccessDenied):
        asked_rdma(headers, operation, is_signed=False)
    assert asked_rdma(named(EMPTY_PUT), operation, is_signed=False) is None


@pytest.mark.parametrize("operation", [Operation.COMPLETE_UPLOAD, Operation.DELETE_OBJECT])
def test_a_token_on_what_moves_no_bytes_of_an_object_is_left_unread(operation: Operation) -> None:
    assert asked_rdma(named({"x-amz-rdma-token": "junk"}), operation, is_signed=True) is None


@pytest.mark.parametrize("name", ["x-rdma-info", "x-scal-rdma", "x-amz-meta-rdma-token"])
@pytest.mark.parametrize("operation", [*WRITES, Operation.GET_OBJECT])
def test_a_dialect_is_refused_by_its_name(operation: Operation, name: str) -> None:
    error = refused({**EMPTY_PUT, name: TOKEN}, operation)
    assert (type(error), error.code, error.row.http_status) == (
        Unsupported,
        "RDMANotSupported",
        501,
    )
    assert name in error.message


def test_metadata_beside_a_body_is_metadata() -> None:
    for lengths in (
        {"content-length": "5"},
        {"content-length": "90", "x-amz-decoded-content-length": "5"},
        {"transfer-encoding": "chunked", "x-amz-decoded-content-length": "5"},
    ):
        headers = named({**lengths, "x-amz-meta-rdma-token": "mine"})
        assert asked_rdma(headers, Operation.PUT_OBJECT, is_signed=True) is None
    framed = {"content-length": "90", "x-amz-decoded-content-length": "0"}
    error = refused({**framed, "x-amz-meta-rdma-token": "mine"}, Operation.PUT_OBJECT)
    assert error.code == "RDMANotSupported"


def test_a_protocol_without_a_token_is_refused_and_one_beside_it_declined() -> None:
    other = {**EMPTY_PUT, "x-amz-rdma-protocol": "hipobj-rc-v2"}
    assert refused(other, Operation.PUT_OBJECT).code == "RDMANotSupported"
    both = named({**other, "x-amz-rdma-token": TOKEN, "x-amz-rdma-agent": "cuobj"})
    assert asked_rdma(both, Operation.PUT_OBJECT, is_signed=True) is not None


def test_a_read_is_declined_by_a_reply_but_to_a_client_that_takes_any_reply_for_a_transfer() -> (
    None
):
    assert decline_headers(head(x_amz_rdma_token=TOKEN)) == {"x-amz-rdma-reply": "501"}
    cpp = head(user_agent="aws-sdk-cpp/1.11.760 ua/2.1", x_amz_api_version="2006-03-01")
    assert decline_headers(cpp) == {}
    assert not declines_write(Operation.GET_OBJECT)
