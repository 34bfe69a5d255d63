"""The ETag of what a request stores: the MD5 of its bytes, or where that costs too much, none.

Clients take an ETag with a dash for no MD5 and do not compare it. The MD5 that a client sends is
verified in both modes.
"""

from __future__ import annotations

import secrets

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.bodies.body import BodyResult
from objectcache_schemas.records import EtagMode

OPAQUE_BYTES = 16  # as many as an MD5, so that it is as long


def wants_md5(exchange: Exchange) -> bool:
    """Whether the request's bucket has the MD5 as ETag."""
    bucket = exchange.access.bucket
    return bucket is None or bucket.configuration.etag_mode is EtagMode.MD5


def etag_of(result: BodyResult) -> str:
    """The body's ETag, without quotes; one that no other has where its MD5 was not wanted."""
    return result.etag_md5_hex or f"{secrets.token_hex(OPAQUE_BYTES)}-1"
