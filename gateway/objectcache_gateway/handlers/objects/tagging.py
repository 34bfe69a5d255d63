"""Tags of objects and of buckets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec
from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.buckets.bucket_configuration import configure
from objectcache_gateway.handlers.buckets.buckets import get_bucket
from objectcache_gateway.handlers.objects.attribute_changes import change_attributes
from objectcache_gateway.handlers.objects.objects import stat_object
from objectcache_gateway.request.tags import OBJECT_TAGS_MAX, parse_tagging
from objectcache_gateway.xml.xml_render import document, element, parent
from objectcache_gateway.xml.xml_tree import parse_apart
from objectcache_schemas.errors import NotFound
from objectcache_schemas.limits import BUCKET_TAGS_MAX


async def get_object_tags(exchange: Exchange) -> web.StreamResponse:
    """GetObjectTagging."""
    return exchange.xml(_tagging(await _object_tags(exchange)))


async def put_object_tags(exchange: Exchange) -> web.StreamResponse:
    """PutObjectTagging: the tags replace those before."""
    await _replace(exchange, await _read_tags(exchange, OBJECT_TAGS_MAX))
    return exchange.empty()


async def delete_object_tags(exchange: Exchange) -> web.StreamResponse:
    """DeleteObjectTagging; without tags it is a success."""
    await _replace(exchange, {})
    return exchange.empty(204)


async def get_bucket_tags(exchange: Exchange) -> web.StreamResponse:
    """GetBucketTagging."""
    tags = (await get_bucket(exchange)).configuration.tags
    if not tags:
        raise NotFound("the bucket has no tags", code="NoSuchTagSet")
    return exchange.xml(_tagging(tags))


async def put_bucket_tags(exchange: Exchange) -> web.StreamResponse:
    """PutBucketTagging: the tags replace those before."""
    tags = await _read_tags(exchange, BUCKET_TAGS_MAX)
    await configure(exchange, tags=tags)
    return exchange.empty(204)


async def delete_bucket_tags(exchange: Exchange) -> web.StreamResponse:
    """DeleteBucketTagging; without tags it is a success."""
    await configure(exchange, tags={})
    return exchange.empty(204)


async def _read_tags(exchange: Exchange, count_max: int) -> dict[str, str]:
    body = await exchange.read_xml()
    return await parse_apart(partial(parse_tagging, count_max=count_max), body)


async def _object_tags(exchange: Exchange) -> Mapping[str, str]:
    return (await stat_object(exchange)).attributes.tags


async def _replace(exchange: Exchange, tags: dict[str, str]) -> None:
    await change_attributes(exchange, lambda seen: msgspec.structs.replace(seen, tags=tags))


def _tagging(tags: Mapping[str, str]) -> bytes:
    entries = [
        parent("Tag", element("Key", key), element("Value", value)) for key, value in tags.items()
    ]
    return document("Tagging", parent("TagSet", *entries))
