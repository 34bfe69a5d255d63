"""What a client says of a delivery in headers: its path, its trace, its own time."""

from __future__ import annotations

import re

from objectcache_gateway.request.request_head import RequestHead
from objectcache_schemas import headers
from objectcache_schemas.delivery_paths import DeliveryPath, cannot_take, parse_path
from objectcache_schemas.messages.request_labels import adopted_client_s, adopted_traceparent

_SECONDS = re.compile(r"[0-9]{1,4}(\.[0-9]{1,9})?")


def client_seconds(head: RequestHead) -> float:
    """What the client says it spent before it sent the request; 0 where it says nothing good."""
    text = head.header(headers.CLIENT_SECONDS) or ""
    return adopted_client_s(float(text)) if _SECONDS.fullmatch(text) else 0.0


def traceparent(head: RequestHead) -> str:
    """The trace that the request belongs to; empty where it names none in W3C's form."""
    return adopted_traceparent(head.header(headers.TRACEPARENT) or "")


def forced_path(head: RequestHead) -> str:
    """The path that the request forces, or empty. Raises `InvalidRequest` for none of the five."""
    path = parse_path(head.header(headers.PATH) or "")
    return path.value if path else ""


def check_plain_get(head: RequestHead) -> None:
    """Raise `InvalidRequest` where a GET without a descriptor forces a path other than s3tcp."""
    path = parse_path(head.header(headers.PATH) or "")
    if path not in (None, DeliveryPath.S3TCP):
        raise cannot_take(path, "needs a descriptor, which names its chunks and its target")
