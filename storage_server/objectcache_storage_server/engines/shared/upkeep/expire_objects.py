"""Deletes objects whose time is over by their bucket's `ttl_s`.

How old an object is at least, this process knows by its own monotonic clock, from when it first saw
the record that stored it. Of what was stored before that the object's own time is asked, too, set
against the wall clock as it was when this process started: a clock that is changed later expires
nothing, and one that is behind keeps nothing for longer than `ttl_s` after a start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.eviction.plan_eviction import expired
from objectcache_storage_server.engines.shared.index.replayed_change import (
    PLACE_BITS,
    ReplayedChange,
)
from objectcache_storage_server.engines.shared.index.version_rows import is_pinned, unpack_version
from objectcache_storage_server.engines.shared.log.log_catalog import LogCatalog
from objectcache_storage_server.engines.shared.upkeep.log_ages import LogAges
from objectcache_storage_server.engines.shared.upkeep.tabulate_versions import store_tables
from objectcache_storage_server.engines.shared.versions import SharedVersionName

RECORD_VERSIONS = 1024  # that one record deletes
CALL_S = 30.0  # for a record
IDLE_FACTOR = 20  # times as long as a search took, until the next
TTL_PART = 20  # of the shortest ttl_s, after which it is searched again at the latest
SEARCH_S_MIN = 1.0


class _Change(Protocol):
    def __call__(self, act: Callable[[ReplayedChange], int], deadline_s: float) -> int: ...


class Expiry:
    """Used by one thread."""

    def __init__(self, catalog: LogCatalog, ages: LogAges, wall_clock: Callable[[], float]) -> None:
        self.expired_objects = 0  # since the start
        self._catalog = catalog
        self._ages = ages
        self._wall_s, self._started_s = wall_clock(), time.monotonic()
        self._next_s = float("-inf")

    def expire(self, change: _Change, now_s: float) -> None:
        """Delete what is too old now, where it is time to look. Raises as `change` does."""
        if now_s < self._next_s:
            return
        with self._catalog.reading() as view:
            rows = view.bucket_rows()
            ttls_s = {
                row.number: row.info.policy.ttl_s
                for row in rows
                if row.info.policy.ttl_s is not None
            }
            if not ttls_s:
                return
            begun_s = time.monotonic()
            objects = store_tables(view, ttls_s.keys()).objects
        objects["modified_s"] = now_s - self._ages_s(objects, now_s)
        old = expired(objects, ttls_s, now_s)
        serials: list[int] = objects["serial"][old].tolist()
        took_s = time.monotonic() - begun_s
        wait_s = max(SEARCH_S_MIN, min(ttls_s.values()) / TTL_PART, IDLE_FACTOR * took_s)
        self._next_s = now_s + wait_s
        for begin in range(0, len(serials), RECORD_VERSIONS):
            some = serials[begin : begin + RECORD_VERSIONS]

            def act(change: ReplayedChange, some: list[int] = some) -> int:
                return len(change.delete(_unpinned(change, some)))

            self.expired_objects += change(act, time.monotonic() + CALL_S)

    def _ages_s(self, objects: npt.NDArray[np.void], now_s: float) -> npt.NDArray[np.float64]:
        records = objects["serial"] >> np.uint64(PLACE_BITS)
        known, places = np.unique(records, return_inverse=True)
        ages_s = np.array([self._ages.age_s(each, now_s) for each in known.tolist()], np.float64)
        least_s = ages_s[places] if len(known) else np.empty(0, np.float64)
        told_s = self._wall_s + now_s - self._started_s - objects["modified_s"]
        is_older = records < self._ages.first_end
        return np.where(is_older, np.maximum(least_s, told_s), least_s)


def _unpinned(change: ReplayedChange, serials: list[int]) -> list[SharedVersionName]:
    names: list[SharedVersionName] = []
    for serial in serials:
        row = change.stored_row(serial)
        if row is not None and not is_pinned(row):
            names.append(unpack_version(row, serial).name)
    return names
