"""What every engine with a catalog does alike: buckets, and looking objects up."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic

import msgspec

from objectcache_schemas.layout import KvLayout
from objectcache_schemas.records import BucketConfiguration, BucketInfo, ObjectInfo
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.bucket_rules import (
    bucket_exists,
    bucket_not_empty,
    check_layout_change,
    no_such_key,
)
from objectcache_storage_server.engines.catalog import BucketRow, Catalog, V
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch

log = logging.getLogger("objectcache.storage_server.engines")


class DamageCount:
    """Objects that an engine dropped because they are not what was stored."""

    def __init__(self) -> None:
        self.total = 0  # since the start
        self._lock = threading.Lock()

    def add(self, key: str, reason: str) -> None:
        """One more was dropped."""
        with self._lock:
            self.total += 1
        log.error("dropped the damaged object %r: %s", key, reason)


class CatalogEngine(Engine, Generic[V]):
    """An engine whose buckets and keys are in a catalog."""

    def __init__(self, flush_latch: FlushLatch, damage: DamageCount) -> None:
        self.flush_latch = flush_latch
        self.damage = damage

    @property
    @abstractmethod
    def catalog(self) -> Catalog[V]:
        """Where its buckets and keys are."""

    # --- buckets ---

    def create_bucket(self, bucket: BucketInfo) -> None:
        with self.catalog.writing() as change:
            existing = change.find_bucket(bucket.name)
            if existing is not None:
                raise bucket_exists(existing.info, bucket)
            change.add_bucket(bucket)

    def bucket(self, name: str) -> BucketInfo:
        return self.bucket_row(name).info

    def bucket_row(self, name: str) -> BucketRow:
        """A bucket with its number. Raises `NotFound` (NoSuchBucket)."""
        with self.catalog.reading() as view:
            return view.bucket(name)

    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        with self.catalog.reading() as view:
            return view.buckets(after, limit)

    def delete_bucket(self, name: str) -> None:
        with self.catalog.writing() as change:
            number = change.bucket(name).number
            if not change.is_empty(number):
                raise bucket_not_empty(name)
            change.remove_bucket(number)

    def set_layout(self, name: str, layout: KvLayout) -> None:
        with self.catalog.writing() as change:
            bucket = change.bucket(name)
            misfit_key = change.key_of_other_size(bucket.number, layout.chunk_bytes)
            check_layout_change(bucket.info, layout, misfit_key)
            changed = msgspec.structs.replace(bucket.info, layout=layout)
            change.replace_bucket(bucket.number, changed)

    def configure_bucket(self, name: str, configuration: BucketConfiguration) -> None:
        self.change_bucket(name, configuration=configuration)

    def change_bucket(self, name: str, **changes: Any) -> None:
        """Replace fields of a bucket's info, durably."""
        with self.catalog.writing() as change:
            bucket = change.bucket(name)
            change.replace_bucket(bucket.number, msgspec.structs.replace(bucket.info, **changes))

    # --- looking up ---

    def stat(self, bucket: str, key: str) -> ObjectInfo:
        with self.catalog.reading() as view:
            version = view.versions(view.bucket(bucket).number, [key]).get(key)
        if version is None:
            raise no_such_key(key)
        return version.info

    def match(self, bucket: str, keys: Sequence[str]) -> int:
        with self.catalog.reading() as view:
            return view.match(view.bucket(bucket).number, keys)

    def scan(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[ObjectInfo]:
        with self.catalog.reading() as view:
            return view.scan(view.bucket(bucket).number, prefix, start_after, limit)

    # --- the engine itself ---

    @property
    def damaged_count(self) -> int:
        return self.damage.total

    @property
    def flush_failure(self) -> str:
        return self.flush_latch.failure
