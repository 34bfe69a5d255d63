"""The bucket that a connector keeps KV in."""

from __future__ import annotations

from objectcache.client import Client
from objectcache.kv_bucket import KvBucket
from objectcache_encodings.lossy import LossyDtype
from objectcache_schemas.errors import Conflict, NotFound
from objectcache_schemas.layout import KvLayout


def open_bucket(
    client: Client, name: str, layout: KvLayout, lossy: LossyDtype | None = None
) -> KvBucket:
    """The bucket seen through `layout`, the engine's own; made, without a layout of its own, where
    it is missing. With `lossy` its chunks are quantised.

    Raises `Conflict` where it has another layout, or the bucket is another's.
    """
    try:
        return client.kv_bucket(name, layout, lossy=lossy)
    except NotFound as error:
        if error.code != "NoSuchBucket":
            raise
    try:
        client.create_bucket(name)
    except Conflict as error:  # another process was first
        if error.code != "BucketAlreadyOwnedByYou":
            raise
    return client.kv_bucket(name, layout, lossy=lossy)
