"""Tags of objects and of buckets."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from objectcache_gateway.exchange import Exchange
from objectcache_gateway.handlers.bucket_configuration import change_configuration
from objectcache_gateway.handlers.buckets import get_bucket
from objectcache_gateway.handlers.objects import stat_object
from objectcache_gateway.handlers.xml_render import document, element, parent
from objectcache_gateway.request.tags import BUCKET_TAGS_MAX, OBJECT_TAGS_MAX, parse_tagging
from objectcache_schemas.errors import NotFound, PreconditionFailed
from objectcache_schemas.messages import Object, ReplaceAttributes

REPLACE_ATTEMPTS_MAX = 5  # each fails only because the object was overwritten meanwhile


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
    await change_configuration(exchange, lambda seen: msgspec.structs.replace(seen, tags=tags))
    return exchange.empty(204)


async def delete_bucket_tags(exchange: Exchange) -> web.StreamResponse:
    """DeleteBucketTagging; without tags it is a success."""
    await change_configuration(exchange, lambda seen: msgspec.structs.replace(seen, tags={}))
    return exchange.empty(204)


async def _read_tags(exchange: Exchange, count_max: int) -> dict[str, str]:
    decoder = exchange.decoder(exchange.settings.limits.xml_body_bytes_max)
    return parse_tagging(await exchange.read_body(decoder), count_max)


async def _object_tags(exchange: Exchange) -> Mapping[str, str]:
    return (await stat_object(exchange)).attributes.tags


async def _replace(exchange: Exchange, tags: dict[str, str]) -> None:
    for attempt in range(1, REPLACE_ATTEMPTS_MAX + 1):
        info = await stat_object(exchange)
        request = ReplaceAttributes(
            bucket=exchange.bucket,
            key=exchange.key,
            etag=info.etag,
            attributes=msgspec.structs.replace(info.attributes, tags=tags),
        )
        try:
            await exchange.storage.call(request, Object)
        except PreconditionFailed:
            if attempt == REPLACE_ATTEMPTS_MAX:
                raise
        else:
            return


def _tagging(tags: Mapping[str, str]) -> bytes:
    entries = [
        parent("Tag", element("Key", key), element("Value", value)) for key, value in tags.items()
    ]
    return document("Tagging", parent("TagSet", *entries))
