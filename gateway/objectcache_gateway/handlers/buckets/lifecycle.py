"""A bucket's lifecycle rules."""

from __future__ import annotations

from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.buckets.bucket_configuration import configure
from objectcache_gateway.handlers.buckets.buckets import get_bucket
from objectcache_gateway.xml.lifecycle_xml import (
    LIFECYCLE_BYTES_MAX,
    lifecycle_document,
    parse_lifecycle,
)
from objectcache_gateway.xml.xml_tree import parse_apart
from objectcache_schemas.errors import NotFound


async def get_lifecycle(exchange: Exchange) -> web.StreamResponse:
    """GetBucketLifecycleConfiguration."""
    rules = (await get_bucket(exchange)).configuration.lifecycle
    if not rules:
        raise NotFound("the bucket has no lifecycle rules", code="NoSuchLifecycleConfiguration")
    return exchange.xml(lifecycle_document(rules))


async def put_lifecycle(exchange: Exchange) -> web.StreamResponse:
    """PutBucketLifecycleConfiguration: the rules replace those before."""
    body = await exchange.read_xml(LIFECYCLE_BYTES_MAX)
    rules = await parse_apart(parse_lifecycle, body)
    await configure(exchange, lifecycle=rules)
    return exchange.empty()


async def delete_lifecycle(exchange: Exchange) -> web.StreamResponse:
    """DeleteBucketLifecycle; without rules it is a success."""
    await configure(exchange, lifecycle=())
    return exchange.empty(204)
