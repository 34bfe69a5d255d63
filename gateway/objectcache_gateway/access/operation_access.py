"""Which access each operation needs, and to what. Pure.

An operation that is missing here is nobody's but root's.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from objectcache_gateway.request.routes import Operation
from objectcache_schemas.accounts import Access


class Applies(enum.Enum):
    """What of the store the access must be to."""

    SERVICE = "no bucket: everybody who signs may"
    NEW_BUCKET = "a bucket that is to be made"
    SOME_OF_BUCKET = "anything in the bucket"
    WHOLE_BUCKET = "the bucket with all its keys"
    LISTED = "the keys that begin with the query's prefix"
    KEY = "the key that the path names"
    KEYS_OF_BODY = "the keys in the body, which the handler checks one by one"


class Needed(NamedTuple):
    """The access that an operation needs."""

    access: Access | None  # None is any
    applies: Applies


_O, _A = Operation, Applies
_READ, _WRITE, _ADMIN = Access.READ, Access.WRITE, Access.ADMIN

NEEDED: dict[Operation, Needed] = {
    _O.LIST_BUCKETS: Needed(None, _A.SERVICE),
    _O.CREATE_SESSION: Needed(None, _A.SERVICE),
    _O.JOIN_SESSION: Needed(None, _A.SERVICE),
    _O.LIST_KV_SERVERS: Needed(None, _A.SERVICE),
    _O.CREATE_BUCKET: Needed(_ADMIN, _A.NEW_BUCKET),
    _O.DELETE_BUCKET: Needed(_ADMIN, _A.WHOLE_BUCKET),
    _O.HEAD_BUCKET: Needed(None, _A.SOME_OF_BUCKET),
    _O.GET_BUCKET_LOCATION: Needed(None, _A.SOME_OF_BUCKET),
    _O.GET_BUCKET_VERSIONING: Needed(None, _A.SOME_OF_BUCKET),
    _O.GET_BUCKET_REQUEST_PAYMENT: Needed(None, _A.SOME_OF_BUCKET),
    _O.GET_BUCKET_ACL: Needed(_READ, _A.WHOLE_BUCKET),
    _O.PUT_BUCKET_ACL: Needed(_ADMIN, _A.WHOLE_BUCKET),
    _O.GET_BUCKET_TAGGING: Needed(_READ, _A.WHOLE_BUCKET),
    _O.PUT_BUCKET_TAGGING: Needed(_ADMIN, _A.WHOLE_BUCKET),
    _O.DELETE_BUCKET_TAGGING: Needed(_ADMIN, _A.WHOLE_BUCKET),
    _O.GET_BUCKET_LIFECYCLE: Needed(_READ, _A.WHOLE_BUCKET),
    _O.PUT_BUCKET_LIFECYCLE: Needed(_ADMIN, _A.WHOLE_BUCKET),
    _O.DELETE_BUCKET_LIFECYCLE: Needed(_ADMIN, _A.WHOLE_BUCKET),
    _O.GET_UNCONFIGURED: Needed(None, _A.SOME_OF_BUCKET),
    _O.GET_KV_LAYOUT: Needed(None, _A.SOME_OF_BUCKET),
    _O.PUT_KV_LAYOUT: Needed(_ADMIN, _A.WHOLE_BUCKET),
    _O.LIST_OBJECTS_V1: Needed(_READ, _A.LISTED),
    _O.LIST_OBJECTS_V2: Needed(_READ, _A.LISTED),
    _O.LIST_OBJECT_VERSIONS: Needed(_READ, _A.LISTED),
    _O.LIST_UPLOADS: Needed(_WRITE, _A.LISTED),
    _O.GET_OBJECT: Needed(_READ, _A.KEY),
    _O.HEAD_OBJECT: Needed(_READ, _A.KEY),
    _O.GET_OBJECT_ACL: Needed(_READ, _A.KEY),
    _O.PUT_OBJECT_ACL: Needed(_ADMIN, _A.KEY),
    _O.GET_OBJECT_ATTRIBUTES: Needed(_READ, _A.KEY),
    _O.GET_OBJECT_TAGGING: Needed(_READ, _A.KEY),
    _O.PUT_OBJECT_TAGGING: Needed(_WRITE, _A.KEY),
    _O.DELETE_OBJECT_TAGGING: Needed(_WRITE, _A.KEY),
    _O.PUT_OBJECT: Needed(_WRITE, _A.KEY),
    _O.COPY_OBJECT: Needed(_WRITE, _A.KEY),  # and read of the source
    _O.DELETE_OBJECT: Needed(_WRITE, _A.KEY),
    _O.DELETE_OBJECTS: Needed(_WRITE, _A.KEYS_OF_BODY),
    _O.CREATE_UPLOAD: Needed(_WRITE, _A.KEY),
    _O.UPLOAD_PART: Needed(_WRITE, _A.KEY),
    _O.UPLOAD_PART_COPY: Needed(_WRITE, _A.KEY),  # and read of the source
    _O.LIST_PARTS: Needed(_WRITE, _A.KEY),
    _O.COMPLETE_UPLOAD: Needed(_WRITE, _A.KEY),
    _O.ABORT_UPLOAD: Needed(_WRITE, _A.KEY),
    _O.KV_GET: Needed(_READ, _A.KEYS_OF_BODY),
    _O.KV_GET_BY_KEY: Needed(_READ, _A.KEYS_OF_BODY),
    _O.KV_MATCH: Needed(_READ, _A.KEYS_OF_BODY),
    _O.KV_PUT: Needed(_WRITE, _A.KEYS_OF_BODY),
}
