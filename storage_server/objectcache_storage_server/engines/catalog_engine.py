"""What every engine with a catalog does alike: buckets, and looking objects up."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic

import msgspec

from objectcache_schemas.layout import KvLayout
from objectcache_schemas.records import BucketConfiguration, BucketInfo, ObjectInfo
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.engines.bucket_rules import (
    bucket_exists,
    bucket_not_empty,
    check_configuration_change,
    check_layout_change,
    no_such_key,
)
from objectcache_storage_server.engines.catalog import (
    BucketRow,
    Catalog,
    CatalogChange,
    CatalogView,
    V,
)
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch

CALL_S_MAX = 30.0  # that a call of a store may take

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

    def deadline_s(self) -> float:
        """Of a call of a store that begins now."""
        return time.monotonic() + CALL_S_MAX

    # --- buckets ---

    def create_bucket(self, bucket: BucketInfo) -> None:
        def act(change: CatalogChange[V]) -> None:
            existing = change.find_bucket(bucket.name)
            if existing is not None:
                raise bucket_exists(existing.info, bucket)
            change.add_bucket(bucket)

        self.catalog.change(act, self.deadline_s())

    def bucket(self, name: str) -> BucketInfo:
        return self.bucket_row(name).info

    def bucket_row(self, name: str) -> BucketRow:
        """A bucket with its number. Raises `NotFound` (NoSuchBucket)."""
        with self.catalog.reading() as view:
            return view.bucket(name)

    def buckets(self, after: str = "", limit: int | None = None) -> list[BucketInfo]:
        with self.catalog.reading() as view:
            return view.buckets(after, limit)

    def delete_bucket(
        self, name: str, judge: Callable[[BucketInfo], None] = lambda _: None
    ) -> None:
        def act(change: CatalogChange[V]) -> None:
            bucket = change.bucket(name)
            judge(bucket.info)
            if not change.is_empty(bucket.number):
                raise bucket_not_empty(name)
            change.remove_bucket(bucket.number)

        self.catalog.change(act, self.deadline_s())

    def set_layout(self, name: str, layout: KvLayout) -> None:
        def act(change: CatalogChange[V]) -> None:
            bucket = change.bucket(name)
            misfit_key = change.key_of_other_size(bucket.number, layout.chunk_bytes)
            check_layout_change(bucket.info, layout, misfit_key)
            changed = msgspec.structs.replace(bucket.info, layout=layout)
            change.replace_bucket(bucket.number, changed)

        self.catalog.change(act, self.deadline_s())

    def configure_bucket(
        self,
        name: str,
        configuration: BucketConfiguration,
        replaces: BucketConfiguration | None = None,
    ) -> None:
        def act(change: CatalogChange[V]) -> None:
            bucket = change.bucket(name)
            check_configuration_change(bucket.info, replaces)
            changed = msgspec.structs.replace(bucket.info, configuration=configuration)
            change.replace_bucket(bucket.number, changed)

        self.catalog.change(act, self.deadline_s())

    def change_bucket(self, name: str, **changes: Any) -> None:
        """Replace fields of a bucket's info, durably."""

        def act(change: CatalogChange[V]) -> None:
            bucket = change.bucket(name)
            change.replace_bucket(bucket.number, msgspec.structs.replace(bucket.info, **changes))

        self.catalog.change(act, self.deadline_s())

    # --- looking up ---

    @contextlib.contextmanager
    def looking_up(self, bucket: str) -> Generator[tuple[CatalogView[V], BucketRow], None, None]:
        """One moment of the catalog, not before this call, and a bucket in it. Raises `NotFound`
        (NoSuchBucket).
        """
        with self.catalog.reading() as view:
            yield view, view.bucket(bucket)

    def stat(self, bucket: str, key: str) -> ObjectInfo:
        with self.looking_up(bucket) as (view, row):
            version = view.versions(row.number, [key]).get(key)
        if version is None:
            raise no_such_key(key)
        return version.info

    def match(self, bucket: str, keys: Sequence[str]) -> int:
        with self.looking_up(bucket) as (view, row):
            return view.match(row.number, keys)

    def scan(self, bucket: str, prefix: str, start_after: str, limit: int) -> list[ObjectInfo]:
        with self.looking_up(bucket) as (view, row):
            return view.scan(row.number, prefix, start_after, limit)

    # --- the engine itself ---

    @property
    def damaged_count(self) -> int:
        return self.damage.total

    @property
    def flush_failure(self) -> str:
        return self.flush_latch.failure
