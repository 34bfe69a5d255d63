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
from objectcache_storage_server.puts.store_means import StoreMeans
from objectcache_storage_server.s3.bucket_requests import check_not_hidden
from objectcache_storage_server.s3.list_objects import list_objects


def list_stored(means: StoreMeans, request: ListObjects) -> Listing:
    """`ListObjects`."""
    with means.calls.engine.scanning(request.bucket) as scan:
        return list_objects(request, scan)


def replace_attributes(means: StoreMeans, request: ReplaceAttributes) -> Object:
    """`ReplaceAttributes`."""
    check_not_hidden(request.bucket)
    info = means.calls.engine.replace_attributes(request.bucket, request.seen, request.attributes)
    return Object(info=info)


def delete_objects(means: StoreMeans, request: DeleteObjects) -> Done:
    """`DeleteObjects`."""
    means.calls.engine.delete(request.bucket, request.keys)
    means.books.stored.shrunk(request.bucket)
    return Done()


def pin_objects(means: StoreMeans, request: PinObjects) -> ObjectsPinned:
    """`PinObjects`."""
    check_not_hidden(request.bucket)
    return ObjectsPinned(count=means.calls.engine.pin(request.bucket, request.keys, request.pinned))


def match_prefix(means: StoreMeans, request: KvMatch) -> Matched:
    """`KvMatch`."""
    matched = means.calls.engine.match(request.bucket, request.chunk_keys)
    layout = means.calls.engine.bucket(request.bucket).layout
    return Matched(matched=matched, chunk_tokens=layout.chunk_tokens if layout else 0)
