"""What a client says of a delivery in headers: its id, its path, its trace, its own time.

None of it is trusted: ids go into logs and error documents, so anything but a plain word is dropped
before it gets there.
"""

from __future__ import annotations

import re

from objectcache_gateway.request.request_head import RequestHead
from objectcache_schemas import headers
from objectcache_schemas.delivery_paths import DeliveryPath, cannot_take, parse_path

CLIENT_SECONDS_MAX = 3600.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECONDS = re.compile(r"[0-9]{1,4}(\.[0-9]{1,9})?")
# W3C Trace Context, version 00: neither id is all zeros.
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def adopted_request_id(text: str | None) -> str | None:
    """The client's id for its request; None where it sent none that can be used."""
    return text if text is not None and _REQUEST_ID.fullmatch(text) else None


def client_seconds(head: RequestHead) -> float:
    """What the client says it spent before it sent the request; 0 where it says nothing good."""
    text = head.header(headers.CLIENT_SECONDS) or ""
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    return seconds if seconds <= CLIENT_SECONDS_MAX else 0.0


def traceparent(head: RequestHead) -> str:
    """The trace that the request belongs to; empty where it names none in W3C's form."""
    text = head.header(headers.TRACEPARENT) or ""
    return text if _TRACEPARENT.fullmatch(text) else ""


def forced_path(head: RequestHead) -> str:
    """The path that the request forces, or empty. Raises `InvalidRequest` for none of the five."""
    path = parse_path(head.header(headers.PATH) or "")
    return path.value if path else ""


def check_plain_get(head: RequestHead) -> None:
    """Raise `InvalidRequest` where a GET without a descriptor forces a path other than s3tcp."""
    path = parse_path(head.header(headers.PATH) or "")
    if path not in (None, DeliveryPath.S3TCP):
        raise cannot_take(path, "needs a descriptor, which names its chunks and its target")
