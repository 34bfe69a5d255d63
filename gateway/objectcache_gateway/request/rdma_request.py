"""What a request asks of RDMA in headers, by NVIDIA's draft of S3 over RDMA and its dialects.

The traps are writes: a client of S3 over RDMA sends a PUT without a body and takes what looks like
a success for its bytes' safe arrival. So whatever asks for a transfer by RDMA is declined in the
words of the draft or refused, and never stored as an object of no bytes.

Source: "S3 RDMA Protocol Specification", version 1.0, and NIXL's engines for it.
"""

from __future__ import annotations

import hashlib

from objectcache_gateway.request.client_kind import is_cpp_sdk
from objectcache_gateway.request.rdma_token import RdmaToken, parse_rdma_token
from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.request.routes import Operation
from objectcache_schemas.errors import AccessDenied, InvalidRequest, Unsupported

HEADER = "x-amz-rdma-token"
REPLY = "x-amz-rdma-reply"
DECLINED = "501"
PREFIX = "x-amz-rdma-"

_WRITES = frozenset({Operation.PUT_OBJECT, Operation.UPLOAD_PART})
_TRANSFERS = _WRITES | {Operation.GET_OBJECT}
# Others' headers for the same. Their clients take every 2xx for a transfer by RDMA.
_DIALECTS = ("x-rdma-info", "x-scal-rdma")
_METADATA_DIALECT = "x-amz-meta-rdma-token"  # beside a body it is mere metadata
# The draft says both of an empty body: that it is not signed, and that its hash is.
_EMPTY_HASHES = frozenset({None, "UNSIGNED-PAYLOAD", hashlib.sha256(b"").hexdigest()})


def asked_rdma(head: RequestHead, operation: Operation, *, is_signed: bool) -> RdmaToken | None:
    """The token of a request for a transfer by RDMA; None where it asks for none.

    A token on an operation that moves no object's bytes has nothing to name, and is left unread.

    Raises `InvalidRequest` (InvalidRDMAToken, or InvalidRequest for a PUT that has a body or says
    that it has one), `AccessDenied` for a token that nobody signed, and `Unsupported`
    (RDMANotSupported) for a dialect of it.
    """
    if operation in _TRANSFERS:
        _refuse_dialects(head, operation)
    elif operation is not Operation.HEAD_OBJECT:
        return None
    text = head.header(HEADER)
    if text is None:
        return None
    if not is_signed:
        raise AccessDenied(f"{HEADER} must be signed, and the request is not")
    token = parse_rdma_token(text.strip())
    if operation in _WRITES:
        _check_write(head)
    return token


def declines_write(operation: Operation) -> bool:
    """Whether declining a transfer ends the request: the bytes of a PUT are still its client's."""
    return operation in _WRITES


def decline_headers(head: RequestHead) -> dict[str, str]:
    """What an answer with the bytes in its body says of the transfer that was asked for.

    No reply is the draft's other way to decline, and the one that clients on AWS's SDK for C++
    understand: an engine of NIXL takes any reply for a transfer, whatever it says.
    """
    return {} if is_cpp_sdk(head) else {REPLY: DECLINED}


def _refuse_dialects(head: RequestHead, operation: Operation) -> None:
    for name in _DIALECTS:
        if head.header(name) is not None:
            raise _not_spoken(name)
    if head.header(_METADATA_DIALECT) is not None and not (
        operation in _WRITES and _announces_bytes(head)
    ):
        raise _not_spoken(_METADATA_DIALECT)
    if operation in _WRITES and head.header(HEADER) is None:
        for name, _ in head.headers:
            if name.startswith(PREFIX):
                raise _not_spoken(f"{name} without {HEADER}")


def _announces_bytes(head: RequestHead) -> bool:
    text = head.header("x-amz-decoded-content-length") or head.header("content-length")
    return text is None or text.strip() != "0"  # a chunked body may have any


def _check_write(head: RequestHead) -> None:
    if head.header("content-length") != "0" or head.header("transfer-encoding") is not None:
        raise _mismatched("needs an empty body and Content-Length: 0")
    if head.header("x-amz-content-sha256") not in _EMPTY_HASHES:
        raise _mismatched("needs x-amz-content-sha256: UNSIGNED-PAYLOAD")
    if head.header("content-md5") is not None:
        raise _mismatched("does not go with Content-MD5, which speaks of the body")


def _mismatched(what: str) -> InvalidRequest:
    return InvalidRequest(f"a PUT with {HEADER} {what}", code="InvalidRequest")


def _not_spoken(name: str) -> Unsupported:
    return Unsupported(
        f"{name} is not served here; send the bytes in the body, without it",
        code="RDMANotSupported",
    )
