"""Requests on objects that take one answer: blocking functions over the engine."""

from __future__ import annotations

from objectcache_schemas.messages.handshake import Done
from objectcache_schemas.messages.kv import KvMatch, Matched
from objectcache_schemas.messages.reads import Listing, ListObjects, Object
from objectcache_schemas.messages.writes import (
    DeleteObjects,
    ObjectsPinned,
    PinObjects,
    ReplaceAttributes,
)
from objectcache_storage_server.s3.bucket_requests import check_not_hidden
from objectcache_storage_server.s3.list_objects import list_objects
from objectcache_storage_server.service import Service


def list_stored(service: Service, request: ListObjects) -> Listing:
    """`ListObjects`."""
    with service.engine.scanning(request.bucket) as scan:
        return list_objects(request, scan)


def replace_attributes(service: Service, request: ReplaceAttributes) -> Object:
    """`ReplaceAttributes`."""
    check_not_hidden(request.bucket)
    info = service.engine.replace_attributes(request.bucket, request.seen, request.attributes)
    return Object(info=info)


def delete_objects(service: Service, request: DeleteObjects) -> Done:
    """`DeleteObjects`."""
    service.engine.delete(request.bucket, request.keys)
    service.stored.shrunk(request.bucket)
    return Done()


def pin_objects(service: Service, request: PinObjects) -> ObjectsPinned:
    """`PinObjects`."""
    check_not_hidden(request.bucket)
    return ObjectsPinned(count=service.engine.pin(request.bucket, request.keys, request.pinned))


def match_prefix(service: Service, request: KvMatch) -> Matched:
    """`KvMatch`."""
    matched = service.engine.match(request.bucket, request.chunk_keys)
    layout = service.engine.bucket(request.bucket).layout
    return Matched(matched=matched, chunk_tokens=layout.chunk_tokens if layout else 0)
