"""Requests on objects that take one answer: blocking functions over the engine."""

from __future__ import annotations

from objectcache_schemas.messages.reads import Listing, ListObjects, Object, StatObject
from objectcache_schemas.messages.writes import (
    ObjectsPinned,
    PinObjects,
    ReplaceAttributes,
)
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.s3.bucket_requests import check_not_hidden
from objectcache_storage_server.s3.list_objects import list_objects


def stat_object(engine: Engine, request: StatObject) -> Object:
    """`StatObject`."""
    return Object(info=engine.stat(request.bucket, request.key))


def list_stored(engine: Engine, request: ListObjects) -> Listing:
    """`ListObjects`."""
    with engine.scanning(request.bucket) as scan:
        return list_objects(request, scan)


def replace_attributes(engine: Engine, request: ReplaceAttributes) -> Object:
    """`ReplaceAttributes`."""
    check_not_hidden(request.bucket)
    info = engine.replace_attributes(request.bucket, request.seen, request.attributes)
    return Object(info=info)


def pin_objects(engine: Engine, request: PinObjects) -> ObjectsPinned:
    """`PinObjects`."""
    check_not_hidden(request.bucket)
    return ObjectsPinned(count=engine.pin(request.bucket, request.keys, request.pinned))
