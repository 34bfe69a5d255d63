"""The handler of each operation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from objectcache_gateway.answering.http_exchange import Exchange
from objectcache_gateway.handlers.buckets import buckets, lifecycle, listing
from objectcache_gateway.handlers.kv import client_sessions, known_servers, prefixes
from objectcache_gateway.handlers.objects import acls, attributes, copy_objects, objects, tagging
from objectcache_gateway.handlers.uploads import complete_upload, multipart
from objectcache_gateway.request.routes import Operation

Handler = Callable[[Exchange], Awaitable[web.StreamResponse]]

HANDLERS: dict[Operation, Handler] = {
    Operation.LIST_BUCKETS: buckets.list_buckets,
    Operation.CREATE_BUCKET: buckets.create_bucket,
    Operation.HEAD_BUCKET: buckets.head_bucket,
    Operation.DELETE_BUCKET: buckets.delete_bucket,
    Operation.GET_BUCKET_LOCATION: buckets.get_location,
    Operation.GET_BUCKET_VERSIONING: buckets.get_versioning,
    Operation.GET_BUCKET_ACL: acls.get_bucket_acl,
    Operation.PUT_BUCKET_ACL: acls.put_bucket_acl,
    Operation.GET_BUCKET_REQUEST_PAYMENT: buckets.get_request_payment,
    Operation.GET_BUCKET_TAGGING: tagging.get_bucket_tags,
    Operation.PUT_BUCKET_TAGGING: tagging.put_bucket_tags,
    Operation.DELETE_BUCKET_TAGGING: tagging.delete_bucket_tags,
    Operation.GET_BUCKET_LIFECYCLE: lifecycle.get_lifecycle,
    Operation.PUT_BUCKET_LIFECYCLE: lifecycle.put_lifecycle,
    Operation.DELETE_BUCKET_LIFECYCLE: lifecycle.delete_lifecycle,
    Operation.GET_UNCONFIGURED: buckets.get_unconfigured,
    Operation.LIST_OBJECTS_V1: listing.list_objects_v1,
    Operation.LIST_OBJECTS_V2: listing.list_objects_v2,
    Operation.LIST_OBJECT_VERSIONS: listing.list_object_versions,
    Operation.DELETE_OBJECTS: objects.delete_objects,
    Operation.PUT_OBJECT: objects.put_object,
    Operation.COPY_OBJECT: copy_objects.copy_object,
    Operation.GET_OBJECT: objects.get_object,
    Operation.HEAD_OBJECT: objects.head_object,
    Operation.DELETE_OBJECT: objects.delete_object,
    Operation.GET_OBJECT_ACL: acls.get_object_acl,
    Operation.PUT_OBJECT_ACL: acls.put_object_acl,
    Operation.GET_OBJECT_ATTRIBUTES: attributes.get_object_attributes,
    Operation.GET_OBJECT_TAGGING: tagging.get_object_tags,
    Operation.PUT_OBJECT_TAGGING: tagging.put_object_tags,
    Operation.DELETE_OBJECT_TAGGING: tagging.delete_object_tags,
    Operation.CREATE_UPLOAD: multipart.create_upload,
    Operation.UPLOAD_PART: multipart.upload_part,
    Operation.UPLOAD_PART_COPY: copy_objects.upload_part_copy,
    Operation.LIST_PARTS: multipart.list_parts,
    Operation.LIST_UPLOADS: multipart.list_uploads,
    Operation.COMPLETE_UPLOAD: complete_upload.complete_upload,
    Operation.ABORT_UPLOAD: multipart.abort_upload,
    Operation.KV_GET: prefixes.get,
    Operation.KV_GET_BY_KEY: prefixes.get_by_key,
    Operation.KV_MATCH: prefixes.match,
    Operation.KV_PUT: prefixes.put,
    Operation.PUT_KV_LAYOUT: prefixes.put_layout,
    Operation.GET_KV_LAYOUT: prefixes.get_layout,
    Operation.CREATE_SESSION: prefixes.create_session,
    Operation.JOIN_SESSION: client_sessions.join_session,
    Operation.LIST_KV_SERVERS: known_servers.list_servers,
}

# Engines ask these, and compute where they are refused: waiting for a restart takes them longer.
COMPUTED_INSTEAD = frozenset(
    {
        Operation.KV_GET,
        Operation.KV_GET_BY_KEY,
        Operation.KV_MATCH,
        Operation.CREATE_SESSION,
        Operation.JOIN_SESSION,
    }
)
