"""Listings of a bucket's objects: versions 1 and 2, and the stub of ListObjectVersions."""

from __future__ import annotations

from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.buckets.buckets import get_bucket
from objectcache_gateway.request.listing_params import (
    ListingParams,
    key_to_token,
    listing_params,
    v2_start_after,
)
from objectcache_gateway.xml.xml_render import document, element, is_xml_text, object_entry, parent
from objectcache_schemas.messages.reads import Listing, ListObjects


async def list_objects_v1(exchange: Exchange) -> web.StreamResponse:
    """ListObjects: a page continues after `marker`."""
    query = exchange.query
    params = listing_params(query, query.get("marker", ""))
    listing = await _page(exchange, params)
    encoded = params.encoded
    # S3 names the next marker only where the last key of the page would not do.
    next_marker = listing.next_start_after if params.delimiter else None
    return exchange.xml(
        document(
            "ListBucketResult",
            element("Name", exchange.bucket),
            element("Prefix", _v1_prefix(params)),
            element("Marker", encoded(params.start_after)),
            element("NextMarker", encoded(next_marker) if next_marker is not None else None),
            *_shared(params, listing),
            *_entries(params, listing, exchange.access.here.owner),
        )
    )


def _v1_prefix(params: ListingParams) -> str:
    """The prefix as version 1 repeats it: botocore, which asks for encoded keys and decodes them,
    takes this one as it is.
    """
    return params.prefix if is_xml_text(params.prefix) else params.encoded(params.prefix)


async def list_objects_v2(exchange: Exchange) -> web.StreamResponse:
    """ListObjectsV2: a page continues by an opaque token."""
    query = exchange.query
    params = listing_params(query, v2_start_after(query))
    listing = await _page(exchange, params)
    encoded = params.encoded
    after = listing.next_start_after
    start_after = query.get("start-after")
    owner = exchange.access.here.owner if query.get("fetch-owner", "").lower() == "true" else None
    return exchange.xml(
        document(
            "ListBucketResult",
            element("Name", exchange.bucket),
            element("Prefix", encoded(params.prefix)),
            element("StartAfter", encoded(start_after) if start_after is not None else None),
            element("ContinuationToken", query.get("continuation-token")),
            element("NextContinuationToken", key_to_token(after) if after is not None else None),
            element("KeyCount", len(listing.objects) + len(listing.common_prefixes)),
            *_shared(params, listing),
            *_entries(params, listing, owner),
        )
    )


async def list_object_versions(exchange: Exchange) -> web.StreamResponse:
    """ListObjectVersions: every object is its own only version, null."""
    query = exchange.query
    params = listing_params(query, query.get("key-marker", ""))
    listing = await _page(exchange, params)
    encoded, after = params.encoded, listing.next_start_after
    return exchange.xml(
        document(
            "ListVersionsResult",
            element("Name", exchange.bucket),
            element("Prefix", encoded(params.prefix)),
            element("KeyMarker", encoded(params.start_after)),
            element("VersionIdMarker", query.get("version-id-marker", "")),
            element("NextKeyMarker", encoded(after) if after is not None else None),
            element("NextVersionIdMarker", "null" if after is not None else None),
            *_shared(params, listing),
            *_entries(params, listing, exchange.access.here.owner, version=True),
        )
    )


async def _page(exchange: Exchange, params: ListingParams) -> Listing:
    if params.max_keys == 0:
        await get_bucket(exchange)
        return Listing(objects=(), common_prefixes=(), next_start_after=None)
    request = ListObjects(
        bucket=exchange.bucket,
        prefix=params.prefix,
        delimiter=params.delimiter,
        start_after=params.start_after,
        limit=params.max_keys,
    )
    return await exchange.storage.call(request, Listing)


def _shared(params: ListingParams, listing: Listing) -> list[str]:
    return [
        element("MaxKeys", params.max_keys),
        element("Delimiter", params.encoded(params.delimiter) if params.delimiter else None),
        element("EncodingType", params.encoding_type),
        element("IsTruncated", listing.next_start_after is not None),
    ]


def _entries(
    params: ListingParams, listing: Listing, identity: str | None, *, version: bool = False
) -> list[str]:
    encoded = params.encoded
    objects = [
        object_entry(info, encoded(info.key), identity, version=version) for info in listing.objects
    ]
    prefixes = [
        parent("CommonPrefixes", element("Prefix", encoded(prefix)))
        for prefix in listing.common_prefixes
    ]
    return objects + prefixes
