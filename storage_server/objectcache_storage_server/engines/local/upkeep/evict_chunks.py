"""Evicts the least useful chunks: for a put, for a bucket's quota, and below the watermark."""

from __future__ import annotations

import threading

from objectcache_runtime.settings import StorageSettings
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.eviction.plan_eviction import choose_victims
from objectcache_storage_server.engines.local.objects.stored_objects import StoredObjects
from objectcache_storage_server.engines.local.upkeep.spare_used import Spared

QUOTA_TURNS_MAX = 16  # of eviction before one put


class Evictor:
    """Safe to use from any thread."""

    def __init__(self, stored: StoredObjects, settings: StorageSettings) -> None:
        self.evicted_objects = self.evicted_bytes = 0
        self._stored = stored
        self._settings = settings
        self._evicting = threading.Lock()

    def make_room_in(self, bucket: BucketRow, growth_bytes: int) -> None:
        """Evict from a bucket what its quota wants gone before it grows."""
        quota_bytes = bucket.info.policy.quota_bytes
        if quota_bytes is None or self._settings.when_full != "evict":
            return
        if growth_bytes > quota_bytes:
            return
        for _ in range(QUOTA_TURNS_MAX):  # extents come free, objects count
            stored_bytes = self._stored.holdings.stored_bytes.get(bucket.number, 0)
            over_bytes = stored_bytes + growth_bytes - quota_bytes
            if over_bytes <= 0 or not self.evict(over_bytes, bucket.number):
                return

    def evict_for_writer(self, wanted_bytes: int) -> int:
        """Make room for a put, where the settings have it so; returns the bytes that came free."""
        if self._settings.when_full != "evict":
            return 0
        freed_bytes = self.evict(wanted_bytes)
        self._stored.flusher.flush()  # what was replaced in asynchronous buckets waits for it
        return freed_bytes

    def evict(self, wanted_bytes: int, bucket: int | None = None) -> int:
        """Delete the least useful chunks until extents of `wanted_bytes` came free, or as near to
        it as can be had; returns the bytes of extents, 0 only where there is nothing to choose.
        """
        with self._evicting:  # two at once would choose the same
            objects, extents = self._stored.holdings.snapshot()
            victims = choose_victims(objects, extents, wanted_bytes, bucket=bucket)
            spared = Spared(self._stored.holdings, objects)
            before_bytes = self._stored.holdings.allocated_bytes
            removed = self._stored.remove_numbers(victims, objects, spared.filter)
            self._stored.forget_lost()  # which would be chosen again and again
        self.evicted_objects += len(removed)
        self.evicted_bytes += sum(version.info.size_bytes for version in removed)
        # Where every victim was spared, another turn chooses others: that is not 0.
        return max(before_bytes - self._stored.holdings.allocated_bytes, int(len(victims) > 0))
