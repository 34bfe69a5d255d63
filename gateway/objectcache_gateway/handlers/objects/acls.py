"""Access control lists of buckets and objects.

Where gateway.acls is off, every list is the owner's alone: that is what is shown, setting it is a
success, and any other is refused.
"""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web

from objectcache_gateway.access.acl import canned
from objectcache_gateway.access.acl_xml import acl_document, parse_acl
from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.buckets.bucket_configuration import configure
from objectcache_gateway.handlers.buckets.buckets import get_bucket
from objectcache_gateway.handlers.objects.attribute_changes import change_attributes
from objectcache_gateway.handlers.objects.objects import stat_object
from objectcache_gateway.xml.xml_tree import parse_apart
from objectcache_schemas.errors import Conflict, InvalidRequest, Unsupported
from objectcache_schemas.records import AclGrant, ObjectAttributes


async def get_bucket_acl(exchange: Exchange) -> web.StreamResponse:
    """GetBucketAcl."""
    bucket = await get_bucket(exchange)
    grants = bucket.configuration.acl if exchange.settings.gateway.acls else ()
    return exchange.xml(acl_document(bucket.owner, grants))


async def put_bucket_acl(exchange: Exchange) -> web.StreamResponse:
    """PutBucketAcl, by a canned name or an AccessControlPolicy."""
    owner = (await get_bucket(exchange)).owner
    grants = await _asked_grants(exchange, owner)
    await configure(exchange, acl=grants)
    return exchange.empty()


async def get_object_acl(exchange: Exchange) -> web.StreamResponse:
    """GetObjectAcl."""
    attributes = (await stat_object(exchange)).attributes
    owner = attributes.owner or exchange.access.here.owner
    grants = attributes.acl if exchange.settings.gateway.acls else ()
    return exchange.xml(acl_document(owner, grants))


async def put_object_acl(exchange: Exchange) -> web.StreamResponse:
    """PutObjectAcl, by a canned name or an AccessControlPolicy."""
    owner = (await stat_object(exchange)).attributes.owner
    grants = await _asked_grants(exchange, owner or exchange.access.here.owner)

    def listed(seen: ObjectAttributes) -> ObjectAttributes:
        if seen.owner != owner:
            raise Conflict(
                "the object is another user's by now; look at it again", code="OperationAborted"
            )
        return msgspec.structs.replace(seen, acl=grants)

    await change_attributes(exchange, listed)
    return exchange.empty()


async def _asked_grants(exchange: Exchange, owner: str) -> tuple[AclGrant, ...]:
    name = exchange.head.header("x-amz-acl")
    body = b""
    if exchange.request.body_exists:
        body = await exchange.read_xml()
    if (name is None) == (not body):
        raise InvalidRequest("give x-amz-acl or an AccessControlPolicy, one of them")
    bucket_owner = exchange.access.here.owner
    grants = (
        canned(name, owner, bucket_owner)
        if name is not None
        else await parse_apart(partial(parse_acl, owner=owner), body)
    )
    if grants and not exchange.settings.gateway.acls:
        raise Unsupported("access control lists are not honoured; see gateway.acls")
    return grants
