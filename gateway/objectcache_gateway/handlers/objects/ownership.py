"""Whose an object is that a request stores, and what others may do with it."""

from __future__ import annotations

import msgspec

from objectcache_gateway.access.acl import ANONYMOUS, canned
from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_schemas.records import ObjectAttributes


def with_owner(exchange: Exchange, attributes: ObjectAttributes) -> ObjectAttributes:
    """The attributes of an object that is stored by this request, with its list and, where it is
    not the bucket's, its owner.
    """
    if not exchange.settings.gateway.acls:
        return attributes
    access = exchange.access
    bucket_owner = access.here.owner
    is_owners = access.caller.is_root or exchange.identity in (ANONYMOUS, bucket_owner)
    owner = "" if is_owners else exchange.identity
    name = exchange.head.header("x-amz-acl")
    grants = canned(name, owner or bucket_owner, bucket_owner) if name is not None else ()
    return msgspec.structs.replace(attributes, acl=grants, owner=owner)
