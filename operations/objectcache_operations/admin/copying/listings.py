"""What a bucket holds, page after page of ListObjectsV2."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree

from objectcache.channel.http_channel import HttpChannel
from objectcache.channel.requests import GatewayRequest
from objectcache_operations.admin.copying.inventory import Listed
from objectcache_schemas.errors import ObjectCacheError

XML = "{http://s3.amazonaws.com/doc/2006-03-01/}"


def listed_pages(channel: HttpChannel, bucket: str) -> Iterator[list[Listed]]:
    """All objects of a bucket in the order of their keys, up to 1,000 at a time.

    Raises `NotFound`, and `ObjectCacheError` for an answer that is no listing.
    """
    query = {"list-type": "2", "encoding-type": "url"}
    token: str | None = ""
    while token is not None:
        asked = query | ({"continuation-token": token} if token else {})
        path = f"/{quote(bucket, safe='')}"
        request = GatewayRequest("GET", path, urlencode(sorted(asked.items()), quote_via=quote))
        page, token = parse_page(channel.call(request).body)
        yield page


def parse_page(document: bytes) -> tuple[list[Listed], str | None]:
    """The objects of a page, and the token of the next one; None after the last."""
    try:
        # Of a server that the operator named; expat bounds what entities grow to.
        root = ElementTree.fromstring(document)  # noqa: S314
        page = [_listed(entry) for entry in root.iterfind(f"{XML}Contents")]
        return page, root.findtext(f"{XML}NextContinuationToken")
    except (ElementTree.ParseError, ValueError) as error:
        raise ObjectCacheError(f"what should be a bucket's listing is none: {error}") from error


def _listed(entry: ElementTree.Element) -> Listed:
    """Raises `ValueError` where something is missing."""
    key, size, etag, modified = (
        entry.findtext(f"{XML}{name}") for name in ("Key", "Size", "ETag", "LastModified")
    )
    if not key or size is None or etag is None or modified is None:
        raise ValueError("an object has no key, size, ETag or time")
    return Listed(unquote(key), int(size), etag.strip('"'), modified)
