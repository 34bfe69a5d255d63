"""The one background thread of the local stored.

Each round: what waits is flushed, the page cache's budget is measured and extents change their path
with it, what is too old or too much goes, chunks that lie badly are moved together, and now and
then the order of uses is written to the index, so that a restart does not forget it. A step that
fails keeps no other from its turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

import numpy as np

from objectcache_runtime.settings import StorageSettings
from objectcache_schemas.errors import ObjectCacheError, StorageFull
from objectcache_schemas.limits import MIB
from objectcache_storage_server.engines.eviction.plan_eviction import expired
from objectcache_storage_server.engines.local.direct.alignment import split_at
from objectcache_storage_server.engines.local.index.lmdb_index import USES_ROWS
from objectcache_storage_server.engines.local.objects.stored_objects import StoredObjects
from objectcache_storage_server.engines.local.residency.budget import (
    Budget,
    page_cache_budget,
    settled_budget,
)
from objectcache_storage_server.engines.local.residency.memory_state import MemoryReader
from objectcache_storage_server.engines.local.residency.planner import decay, replan
from objectcache_storage_server.engines.local.upkeep.evict_chunks import Evictor
from objectcache_storage_server.engines.local.upkeep.move_chunks import Compactor
from objectcache_storage_server.engines.local.volumes.volume import IoPath

ROUND_S = 0.5  # also how long an asynchronous put may wait for its flush
BUDGET_EVERY_S = 2.0
MOVES_MAX = 64  # extents that change their path in one round
USES_EVERY_S = 30.0
SPARE_SEGMENTS = 1  # wholly free ones that are kept for the next puts
FILL_PIECE_BYTES = 8 * MIB  # read between two looks at whether a reader wants the device
FILL_S = 0.25  # of one round, so that other steps have their turn
FILL_ROUND_S = 0.1  # while something is to come into memory
FILL_BUSY_EVERY_S = 1.0  # one extent, where readers never leave the device alone
COMPLAIN_EVERY_S = 60.0  # about one step: what fails fails twice a second
FRUITLESS_EVICTION_S = 5.0  # until the next where there was nothing to evict: it looks at all

log = logging.getLogger("objectcache.storage_server.engines.local.upkeep")


class Upkeep:
    """Runs rounds until it is closed; `round` may also be called directly."""

    def __init__(
        self,
        stored: StoredObjects,
        evictor: Evictor,
        compactor: Compactor,
        settings: StorageSettings,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.compactor = compactor
        self.expired_objects = 0
        self._evictor = evictor
        self._clock = clock
        self._stored = stored
        self.budget = Budget(0, "not measured yet")
        self._memory = MemoryReader()
        self._wake = threading.Event()
        self._closing = False
        self._one_round = threading.Lock()
        self._budget_s = self._uses_s = self._decayed_s = time.monotonic()
        self._stored_uses = stored.holdings.clock_of_uses
        self._complained_s: dict[str, float] = {}  # by step
        self._evict_next_s = float("-inf")
        self._filled_s = self._budget_s
        self._objects_kept = -1  # how many there were when none of them could be evicted
        self._measure_budget()
        self._replan(self._decayed_s, moves_max=len(stored.holdings.extents))
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Do not wait for the next round."""
        self._wake.set()

    def close(self) -> None:
        """End the thread, flush what waits, and store the order of uses. Where a flush has failed,
        what waits stays marked, and is verified when the store is opened again.
        """
        self._closing = True
        self._wake.set()
        self._thread.join()
        if not self._stored.flush_latch.failure:
            self._stored.flusher.flush()
            try:
                self._store_uses()
            except StorageFull as error:  # the order of uses alone is lost
                log.warning("the order of uses is not kept: %s", error.message)

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(FILL_ROUND_S if self._stored.path_use.missing_count else ROUND_S)
            self._wake.clear()
            self.round()

    def round(self, now_s: float | None = None) -> None:
        """One round of everything that is due. Raises nothing: what fails is logged."""
        with self._one_round:
            self._round(time.monotonic() if now_s is None else now_s)

    def _round(self, now_s: float) -> None:
        stored = self._stored
        self._step("flushing", now_s, stored.flusher.flush)
        self._step("forgetting lost objects", now_s, stored.forget_lost)
        if now_s - self._budget_s >= BUDGET_EVERY_S:
            self._budget_s = now_s
            self._step("residency", now_s, lambda: self._settle_residency(now_s))
            self._step("returning files", now_s, self._return_free_segments)
        self._step("filling the page cache", now_s, lambda: self._fill(now_s))
        self._step("expiry", now_s, lambda: self._expire(now_s))
        self._step("eviction", now_s, lambda: self._keep_below_watermark(now_s))
        self._step("compaction", now_s, lambda: self.compactor.round(now_s))
        if now_s - self._uses_s >= USES_EVERY_S:
            self._uses_s = now_s
            self._step("storing uses", now_s, self._store_uses)

    def _step(self, name: str, now_s: float, action: Callable[[], object]) -> None:
        try:
            action()
        except ObjectCacheError as error:
            if self._may_complain(name, now_s):
                log.warning("upkeep goes on after %s failed: %s", name, error)
        except Exception:
            if self._may_complain(name, now_s):
                log.exception("upkeep goes on after a defect in %s", name)

    def _may_complain(self, about: str, now_s: float) -> bool:
        if now_s - self._complained_s.get(about, float("-inf")) < COMPLAIN_EVERY_S:
            return False
        self._complained_s[about] = now_s
        return True

    # --- residency ---

    def _settle_residency(self, now_s: float) -> None:
        self._measure_budget()
        self._replan(now_s)

    def _measure_budget(self) -> None:
        settings = self.settings
        if IoPath.PAGE_CACHE not in self._stored.volume.paths:
            self.budget = Budget(0, "the volume has no page cache")
        else:
            measured = page_cache_budget(
                self._memory.read(),
                settings.server_in_flight_bytes_max,
                settings.page_cache_fraction,
                settings.page_cache_bytes,
            )
            self.budget = settled_budget(self.budget, measured)
        self._stored.holdings.page_cache_budget_bytes = self.budget.bytes

    def _replan(self, now_s: float, moves_max: int = MOVES_MAX) -> None:
        stored, holdings = self._stored, self._stored.holdings
        if len(stored.volume.paths) < len(IoPath):
            return
        with holdings.lock:
            decay(holdings.extents.used, now_s - self._decayed_s)
            extents = holdings.extents.used.copy()
        self._decayed_s = now_s
        plan = replan(extents, self.budget.bytes, moves_max)
        for offset_bytes, length_bytes in joined(holdings.set_paths(plan.to_direct, IoPath.DIRECT)):
            stored.volume.drop_cache(offset_bytes, length_bytes)
        entering: list[int] = plan.to_page_cache.tolist()
        ranges = holdings.ranges(entering)
        entered = [
            number
            for number, (offset_bytes, length_bytes) in zip(entering, ranges, strict=True)
            if stored.volume.enter_cache(offset_bytes, length_bytes)
        ]
        holdings.set_paths(entered, IoPath.PAGE_CACHE)

    def _fill(self, now_s: float) -> None:
        """Bring extents into the page cache that readers did not find there, while the device is
        idle; one now and then where it never is.
        """
        path_use, begun_s = self._stored.path_use, time.monotonic()
        while path_use.missing_count:
            elapsed_s = time.monotonic() - begun_s
            if elapsed_s >= FILL_S:
                return
            is_quiet = path_use.is_quiet(now_s + elapsed_s)
            if not is_quiet and now_s - self._filled_s < FILL_BUSY_EVERY_S:
                return
            self._fill_next(now_s, begun_s, is_quiet)
        self._filled_s = now_s

    def _fill_next(self, now_s: float, begun_s: float, is_quiet: bool) -> None:
        """Bring one extent in, or its begin, where a reader comes who was not there before."""
        path_use = self._stored.path_use
        self._filled_s = now_s
        number = path_use.take_missing()
        if number is None:
            return
        run = self._stored.holdings.cold_range(number)
        for piece in split_at(*run, FILL_PIECE_BYTES) if run is not None else ():
            if is_quiet and not path_use.is_quiet(now_s + time.monotonic() - begun_s):
                path_use.want_resident(number)
                return
            self._stored.volume.prefetch(*piece)

    # --- capacity ---

    def _return_free_segments(self) -> None:
        self._stored.holdings.return_free_segments(SPARE_SEGMENTS)

    def _expire(self, now_s: float) -> None:
        stored = self._stored
        with stored.index.reading() as view:
            rows = view.bucket_rows()
        if view.damage.buckets and self._may_complain("damaged buckets", now_s):
            log.error("the index's rows of these buckets are damaged: %s", view.damage.buckets)
        ttl_s = {
            row.number: row.info.policy.ttl_s for row in rows if row.info.policy.ttl_s is not None
        }
        if ttl_s:
            objects, _ = stored.holdings.snapshot()
            old = expired(objects, ttl_s, self._clock())
            if len(old):
                self.expired_objects += len(stored.remove_numbers(old, objects))

    def _keep_below_watermark(self, now_s: float) -> None:
        stored, settings = self._stored, self.settings
        object_count = len(stored.holdings.objects)
        is_fruitless = now_s < self._evict_next_s and object_count == self._objects_kept
        if settings.when_full != "evict" or is_fruitless:
            return
        capacity_bytes = stored.holdings.capacity_bytes()
        allocated_bytes = stored.holdings.allocated_bytes
        if allocated_bytes > settings.high_watermark * capacity_bytes:
            wanted_bytes = allocated_bytes - int(settings.low_watermark * capacity_bytes)
            if not self._evictor.evict(wanted_bytes):
                self._evict_next_s, self._objects_kept = now_s + FRUITLESS_EVICTION_S, object_count

    def _store_uses(self) -> None:
        stored, holdings = self._stored, self._stored.holdings
        with holdings.lock:
            objects = holdings.objects.used
            recent = objects["is_used"] & (objects["last_used"] > self._stored_uses)
            blocks = np.unique(np.flatnonzero(recent) // USES_ROWS).tolist()
            self._stored_uses = holdings.clock_of_uses
        if blocks:
            with stored.index.writing(durable=False) as change:
                for block in blocks:
                    change.store_uses(holdings.objects, block)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, length) ranges in order, those that touch or overlap made one."""
    whole: list[tuple[int, int]] = []
    for offset_bytes, length_bytes in sorted(ranges):
        if whole and offset_bytes <= sum(whole[-1]):
            first_bytes, so_far = whole[-1]
            whole[-1] = (first_bytes, max(so_far, offset_bytes + length_bytes - first_bytes))
        else:
            whole.append((offset_bytes, length_bytes))
    return whole
