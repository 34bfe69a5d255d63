"""Buckets by name, in pages that fit a message whatever their owners configured."""

from __future__ import annotations

import msgspec

from objectcache_schemas.messages.buckets import Buckets, ListBuckets
from objectcache_schemas.messages.frames import MESSAGE_BYTES_MAX
from objectcache_schemas.records import BucketConfiguration, BucketInfo
from objectcache_storage_server.engines.base import BUCKET_PAGE, Engine

# One bucket more than fits may be in a page: far smaller than the rest of a message.
PAGE_BYTES_MAX = MESSAGE_BYTES_MAX // 8

_ENCODER = msgspec.msgpack.Encoder()
_NO_CONFIGURATION = BucketConfiguration()


def bucket_page(engine: Engine, request: ListBuckets) -> Buckets:
    """The reply to a question for buckets; blocks."""
    found: list[BucketInfo] = []
    page_bytes, after = 0, request.start_after
    while infos := engine.buckets(after, min(BUCKET_PAGE, request.limit - len(found))):
        for info in infos:
            shown = info if request.with_configuration else _plain(info)
            found.append(shown)
            page_bytes += len(_ENCODER.encode(shown))
            if len(found) == request.limit or page_bytes >= PAGE_BYTES_MAX:
                return Buckets(buckets=tuple(found), next_start_after=info.name)
        after = infos[-1].name
    return Buckets(buckets=tuple(found))


def _plain(info: BucketInfo) -> BucketInfo:
    return msgspec.structs.replace(info, configuration=_NO_CONFIGURATION)
