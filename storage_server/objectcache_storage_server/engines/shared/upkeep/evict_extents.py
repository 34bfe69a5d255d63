"""Evicts the least useful chunks: below the watermark, for a bucket's quota, and where the store is
full.

What goes is deleted by records, so it takes up space until the grace has passed: what is in the
graveyard is counted in with the capacity, and is nothing that could be evicted once more.

Victims are chosen in one moment of the index and judged again at the log's end, a record at a time:
an extent that was read or stored since stays, and so does what it continues.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from objectcache_schemas.errors import Busy, StorageFull
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.eviction.plan_eviction import choose_victims
from objectcache_storage_server.engines.key_order import key_hash
from objectcache_storage_server.engines.shared.extents.write_extents import StoreRoom
from objectcache_storage_server.engines.shared.index.index_state import IndexState
from objectcache_storage_server.engines.shared.index.replayed_change import ReplayedChange
from objectcache_storage_server.engines.shared.index.version_rows import is_pinned, unpack_version
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.upkeep.tabulate_versions import (
    parents_since,
    store_tables,
)
from objectcache_storage_server.engines.shared.upkeep.upkeep_rules import UpkeepRules
from objectcache_storage_server.engines.shared.versions import SharedVersion

T = TypeVar("T")
Change = Callable[[Callable[[ReplayedChange], T], float], T]

RECORD_VERSIONS = 1024  # that one record deletes
CALL_S = 30.0  # for a record
LAST_CALL_S = 5.0  # at least, for a put's: one goes also where choosing took all of its time
QUOTA_TURNS_MAX = 4  # of eviction before one put
QUOTA_PART = 64  # a quota's part that goes beside what has to: an eviction reads all of the index
FULL_GRACES = 3  # that a size at which the store was full is believed for, at first
FULL_S_MAX = 24 * 3600.0  # and at most
IDLE_FACTOR = 20  # times as long as an eviction took, until the next for the watermark


class ExtentEvictor(StoreRoom):
    """Safe to use from any thread."""

    def __init__(self, catalog: LogCatalog, rules: UpkeepRules) -> None:
        self.rules = rules
        self.evicted_objects = self.evicted_bytes = 0  # since the start
        self.full_at_bytes = 0  # allocated when the store itself was full; 0 is unknown
        self._catalog = catalog
        self._evicting = threading.Lock()
        self._full_s = FULL_GRACES * rules.grace_s  # from when the store was full
        self._full_until_s = float("inf")
        self._unnamed_bytes = 0  # that are being put
        self._counting = threading.Lock()
        self._next_s = float("-inf")  # by the monotonic clock

    @property
    def capacity_bytes(self) -> int:
        """What the settings say, or as much as there was when the store was full; 0 is unknown."""
        found = [each for each in (self.rules.capacity_bytes, self.full_at_bytes) if each]
        return min(found, default=0)

    # --- for puts ---

    def take(self, size_bytes: int) -> None:
        with self._counting:
            self._unnamed_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.take(-size_bytes)

    def check(self, deadline_s: float) -> None:
        limit_bytes = self.rules.capacity_bytes
        if not limit_bytes or self._taken_bytes() <= limit_bytes:
            return
        self._catalog.follow(deadline_s)  # refused by the log's end only
        if self._taken_bytes() <= limit_bytes:
            return
        self._relieve_unless_evicting(deadline_s)
        buried_bytes = self._state().buried_bytes
        raise StorageFull(
            f"the store takes {limit_bytes} bytes (storage.capacity_bytes); {buried_bytes} of them "
            f"are deleted and come free within storage.grace_s ({self.rules.grace_s:g} s): try "
            f"again later, or raise storage.capacity_bytes"
        )

    def check_size(self, size_bytes: int) -> None:
        """Raise `StorageFull` for what could not be stored even if all else went."""
        limit_bytes = self.rules.capacity_bytes
        if limit_bytes and size_bytes > limit_bytes:
            raise StorageFull(
                f"it has {size_bytes} bytes, the whole store takes {limit_bytes}; raise "
                "storage.capacity_bytes"
            )

    def make(self, size_bytes: int, deadline_s: float) -> None:
        self.full_at_bytes = max(self._taken_bytes() - size_bytes, 1)
        self._full_until_s = time.monotonic() + self._full_s
        self._relieve_unless_evicting(deadline_s)

    def _relieve_unless_evicting(self, deadline_s: float) -> None:
        """For a put that is refused whatever goes, since that comes free with the grace only: it
        does not wait for another that evicts already.
        """
        if self._evicting.acquire(blocking=False):
            try:
                self._relieve(self._catalog.change, deadline_s)
            finally:
                self._evicting.release()

    def make_room_in(
        self, bucket: BucketRow, growth_bytes: int, deadline_s: float, spare_bytes: int = 0
    ) -> bool:
        """Evict from a bucket what its quota wants gone before it grows, and `spare_bytes` more
        where they can be had. Whether there was room for the growth then; without a quota, and
        where nothing may be evicted, there was none to make. Raises `Busy` where others evict until
        the deadline, `StoreTimeout`, `Unavailable`.
        """
        quota_bytes = bucket.info.policy.quota_bytes
        if quota_bytes is None or not self.rules.evicts or not 0 < growth_bytes <= quota_bytes:
            return False
        room_bytes = min(growth_bytes + spare_bytes, quota_bytes)
        for _ in range(QUOTA_TURNS_MAX):  # extents come free, objects count
            over_bytes = self._stored_bytes(bucket) + room_bytes - quota_bytes
            if over_bytes <= 0:
                return True
            wanted_bytes = over_bytes + quota_bytes // QUOTA_PART
            if not self.evict(wanted_bytes, self._catalog.change, bucket.number, deadline_s):
                break
        return self._stored_bytes(bucket) + growth_bytes <= quota_bytes

    def _stored_bytes(self, bucket: BucketRow) -> int:
        with self._catalog.reading() as view:
            return view.totals(bucket.number).stored_bytes

    # --- for the upkeep ---

    def forget_full(self, now_s: float) -> None:
        """Once the store was not full for a while: what filled it may have been another's, and may
        have gone. Each time it is full again that is believed for twice as long.
        """
        if self.full_at_bytes and now_s >= self._full_until_s:
            self.full_at_bytes = 0
            self._full_s = min(2 * self._full_s, FULL_S_MAX)

    def keep_below_watermark(self, change: Change[list[SharedVersion]]) -> None:
        """Evict where so much is taken. `change` makes the records. Raises as it does."""
        if self._is_above(self.rules.high_watermark) and time.monotonic() >= self._next_s:
            with self._evicting:
                self._relieve(change, math.inf)

    def _is_above(self, part: float) -> bool:
        limit_bytes = self.capacity_bytes
        return limit_bytes > 0 and self._state().allocated_bytes > part * limit_bytes

    def _relieve(self, change: Change[list[SharedVersion]], deadline_s: float) -> None:
        """Evict down to the low watermark, not counting what is in the graveyard."""
        rules = self.rules
        if not rules.evicts:
            return
        limit_bytes = self.capacity_bytes
        over_bytes = self._state().extent_bytes - int(rules.low_watermark * limit_bytes)
        # Each time costs a look at all of the index: not for a little that was put since.
        least_bytes = (rules.high_watermark - rules.low_watermark) * limit_bytes / 4
        if over_bytes <= 0 or over_bytes < least_bytes:
            return
        begun_s = time.monotonic()
        self._evict(over_bytes, change, None, deadline_s)
        now_s = time.monotonic()
        self._next_s = now_s + IDLE_FACTOR * (now_s - begun_s)

    def evict(
        self,
        wanted_bytes: int,
        change: Change[list[SharedVersion]],
        bucket: int | None = None,
        deadline_s: float = math.inf,
    ) -> int:
        """Delete the least useful chunks until extents of `wanted_bytes` are empty, or as near to
        it as can be had until the deadline; returns how many were chosen. Raises `Busy` where
        others evict until then.
        """
        wait_s = min(max(deadline_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        if not self._evicting.acquire(timeout=wait_s):  # two at once would choose the same
            raise Busy("the server evicts for other puts; try again")
        try:
            return self._evict(wanted_bytes, change, bucket, deadline_s)
        finally:
            self._evicting.release()

    def _evict(
        self,
        wanted_bytes: int,
        change: Change[list[SharedVersion]],
        bucket: int | None,
        deadline_s: float,
    ) -> int:
        self._catalog.follow(min(time.monotonic() + CALL_S, deadline_s))
        with self._catalog.reading() as view:
            tables = store_tables(view, None if bucket is None else (bucket,))
            end = tables.end
        victims = choose_victims(tables.objects, tables.extents, wanted_bytes, bucket=bucket)
        serials: list[int] = tables.objects["serial"][victims].tolist()
        del tables, victims  # the memory is not needed while records are made
        spared, seen_end = set[int](), end
        for begin in range(0, len(serials), RECORD_VERSIONS):
            some = serials[begin : begin + RECORD_VERSIONS]
            with self._catalog.reading() as view:  # before the record, which others wait for
                spared |= parents_since(view, seen_end)
                seen_end = view.state.end
            deletion = _Deletion(some, end, spared, seen_end)
            left_s = deadline_s - time.monotonic()
            if begin and left_s <= 0:
                break  # the next put goes on
            gone = change(
                deletion.carry_out, time.monotonic() + min(CALL_S, max(LAST_CALL_S, left_s))
            )
            spared |= deletion.spared
            self.evicted_objects += len(gone)
            self.evicted_bytes += sum(version.info.size_bytes for version in gone)
        return len(serials)

    def _taken_bytes(self) -> int:
        return self._state().allocated_bytes + self._unnamed_bytes

    def _state(self) -> IndexState:
        with self._catalog.reading() as view:
            return view.state


class _Deletion:
    """One record of an eviction: ends of prefixes first, those before them later."""

    def __init__(self, serials: Sequence[int], end: int, spared: set[int], seen_end: int) -> None:
        """`end`: of the log when the victims were chosen. `spared`: hashes of chunks that stay, as
        far as the log up to `seen_end` says.
        """
        self._serials = serials
        self._end = end
        self._spared_before = spared
        self._seen_end = seen_end
        self.spared = set[int]()  # and these

    def carry_out(self, change: ReplayedChange) -> list[SharedVersion]:
        """May run more than once."""
        self.spared = parents_since(change, self._seen_end)
        going: list[SharedVersion] = []
        for serial in self._serials:
            row = change.stored_row(serial)
            if row is None:
                continue
            version = unpack_version(row, serial)
            if is_pinned(row) or self._is_wanted(change, version):
                self.spared.add(version.parent_hash)
            else:
                going.append(version)
        change.delete([version.name for version in going])
        return going

    def _is_wanted(self, change: ReplayedChange, version: SharedVersion) -> bool:
        own_hash = key_hash(version.bucket_number, version.info.key)
        if own_hash in self._spared_before or own_hash in self.spared:
            return True
        extents = [change.extent(name) for name in version.extents]
        return any(row is not None and row.last_used >= self._end for row in extents)
