"""Requests without a signature, which are somebody's only where gateway.acls is on."""

from __future__ import annotations

from objectcache_gateway.request.request_head import RequestHead
from objectcache_gateway.signing.signature_claim import UNSIGNED_PAYLOAD
from objectcache_gateway.signing.sigv4 import Authenticated, Payload, payload_mode
from objectcache_schemas.errors import AccessDenied

_QUERY_MARKS = frozenset({"x-amz-algorithm", "x-amz-credential", "x-amz-signature", "signature"})


def is_anonymous(head: RequestHead) -> bool:
    """Whether a request does not even claim to be signed."""
    names = {name.lower() for name, _ in head.query} if head.raw_query else frozenset[str]()
    return head.header("authorization") is None and _QUERY_MARKS.isdisjoint(names)


def anonymous(head: RequestHead) -> Authenticated:
    """What its body must be. Raises `AccessDenied` for chunks that only a key can sign."""
    payload, sha256 = payload_mode(head.header("x-amz-content-sha256") or UNSIGNED_PAYLOAD)
    if payload in (Payload.STREAMING_SIGNED, Payload.STREAMING_SIGNED_TRAILER):
        raise AccessDenied("chunks are signed, and the request is not")
    return Authenticated("", payload, sha256, None, False)
