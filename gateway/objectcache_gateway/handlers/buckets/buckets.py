"""Operations on buckets, and what S3 clients ask about a bucket that has no such configuration."""

from __future__ import annotations

import asyncio
from functools import partial

from aiohttp import web

from objectcache_gateway.access.acl import canned
from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.request.listing_params import key_to_token, page_size, token_to_key
from objectcache_gateway.request.routes import raise_unconfigured
from objectcache_gateway.xml import xml_parse, xml_render
from objectcache_gateway.xml.xml_tree import parse_apart
from objectcache_schemas.errors import AccessDenied, Conflict, InvalidRequest
from objectcache_schemas.messages.buckets import (
    Bucket,
    Buckets,
    CreateBucket,
    DeleteBucket,
    GetBucket,
    ListBuckets,
)
from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.records import BucketConfiguration, BucketInfo

# What clients send that know of no region; s3cmd's default is US.
_ANY_REGION = frozenset({"", "us-east-1", "US"})
THREAD_BUCKETS_MIN = 1000  # a longer list is rendered in a thread, some 10 ms each thousand


async def get_bucket(exchange: Exchange) -> BucketInfo:
    """The request's bucket. Raises `NotFound` (NoSuchBucket)."""
    return (await exchange.storage.call(GetBucket(name=exchange.bucket), Bucket)).info


async def check_expected_owner(exchange: Exchange) -> None:
    """Raise `AccessDenied` where x-amz-expected-bucket-owner is not the bucket's owner.

    Without a bucket there is none to compare with.
    """
    expected = exchange.head.header("x-amz-expected-bucket-owner")
    if expected is None or exchange.address.bucket is None:
        return
    if (await get_bucket(exchange)).owner != expected:
        raise AccessDenied("the bucket's owner is not x-amz-expected-bucket-owner")


async def list_buckets(exchange: Exchange) -> web.StreamResponse:
    """ListBuckets: those that the caller owns or was granted something in, by name."""
    query = exchange.query
    limit = page_size(query, "max-buckets") if "max-buckets" in query else None
    owned = await _seen_buckets(exchange, limit)
    page = owned[:limit]
    continuation = key_to_token(page[-1].name) if page and len(owned) > len(page) else None
    render = partial(
        xml_render.buckets_document, exchange.identity, page, query.get("prefix"), continuation
    )
    is_long = len(page) > THREAD_BUCKETS_MIN
    return exchange.xml(await asyncio.to_thread(render) if is_long else render())


async def _seen_buckets(exchange: Exchange, limit: int | None) -> list[BucketInfo]:
    """The buckets that the query asks for and the caller may see: all, or more than `limit`."""
    query = exchange.query
    prefix = query.get("prefix", "")
    seen: list[BucketInfo] = []
    after: str | None = token_to_key(query.get("continuation-token", ""))
    while after is not None and (limit is None or len(seen) <= limit):
        page = await exchange.storage.call(ListBuckets(start_after=after), Buckets)
        seen += [
            bucket
            for bucket in page.buckets
            if exchange.access.sees(bucket)
            and bucket.name.startswith(prefix)
            and query.get("bucket-region", bucket.region) == bucket.region
        ]
        after = page.next_start_after
    return seen


async def create_bucket(exchange: Exchange) -> web.StreamResponse:
    """CreateBucket, in the one region there is. One's own bucket again is a success."""
    region = exchange.settings.gateway.region
    body = b""
    if exchange.request.body_exists:
        body = await exchange.read_xml()
    location = await parse_apart(xml_parse.parse_location, body)
    if location != region and location not in _ANY_REGION:
        raise InvalidRequest(
            f"the location constraint must be {region} or absent",
            code="IllegalLocationConstraintException",
        )
    grants = canned(exchange.head.header("x-amz-acl") or "private", "", "")
    request = CreateBucket(
        name=exchange.bucket,
        owner=exchange.identity,
        region=region,
        configuration=BucketConfiguration(acl=grants),
    )
    try:
        await exchange.storage.call(request, Done)
    except Conflict as error:
        # As in S3's first region, so that clients may create what they are not sure of.
        if error.code != "BucketAlreadyOwnedByYou":
            raise
    return exchange.empty(more={"Location": f"/{exchange.bucket}"})


async def head_bucket(exchange: Exchange) -> web.StreamResponse:
    """HeadBucket."""
    bucket = await get_bucket(exchange)
    return exchange.empty(more={"x-amz-bucket-region": bucket.region})


async def delete_bucket(exchange: Exchange) -> web.StreamResponse:
    """DeleteBucket, if it is empty."""
    request = DeleteBucket(name=exchange.bucket, identity=exchange.identity)
    await exchange.storage.call(request, Done)
    return exchange.empty(204)


async def get_location(exchange: Exchange) -> web.StreamResponse:
    """GetBucketLocation; S3 writes us-east-1 as nothing."""
    region = (await get_bucket(exchange)).region
    text = "" if region == "us-east-1" else xml_render.escape(region)
    return exchange.xml(xml_render.document("LocationConstraint", text))


async def get_versioning(exchange: Exchange) -> web.StreamResponse:
    """GetBucketVersioning: never configured."""
    await get_bucket(exchange)
    return exchange.xml(xml_render.document("VersioningConfiguration"))


async def get_request_payment(exchange: Exchange) -> web.StreamResponse:
    """GetBucketRequestPayment: the owner pays."""
    await get_bucket(exchange)
    payer = xml_render.element("Payer", "BucketOwner")
    return exchange.xml(xml_render.document("RequestPaymentConfiguration", payer))


async def get_unconfigured(exchange: Exchange) -> web.StreamResponse:
    """A configuration that buckets do not have here: S3's 404 for it."""
    await get_bucket(exchange)
    raise_unconfigured(exchange.query)
