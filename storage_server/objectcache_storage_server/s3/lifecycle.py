"""What buckets' lifecycle rules ask for: old objects go, and so do uploads that nobody completes.

A thread of its own pages through the keys that a rule covers. A page is one look-up and, where
something is old, one delete; between two pages it rests as long as the page took, so a sweep takes
half of one core at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from objectcache_schemas.errors import NotFound, ObjectCacheError
from objectcache_schemas.records import BucketInfo, LifecycleRule, ObjectInfo
from objectcache_storage_server.engines.base import Engine
from objectcache_storage_server.s3 import multipart

PAGE_OBJECTS = 1000
STOP_TIMEOUT_S = 60.0  # a delete that is under way ends first

logger = logging.getLogger("objectcache.storage_server.lifecycle")


@dataclass(slots=True)
class LifecycleCounts:
    """What sweeps did since the start."""

    sweeps: int = 0
    expired_objects: int = 0
    expired_bytes: int = 0
    aborted_uploads: int = 0
    failures: int = 0  # buckets that a sweep gave up on, until the next


class Rest(Protocol):
    """Waits between two pages; true ends the sweep."""

    def __call__(self, seconds: float, /) -> bool: ...


class LifecycleSweep:
    """One way through all buckets, at one time."""

    def __init__(
        self,
        engine: Engine,
        counts: LifecycleCounts,
        day_s: float,
        now_s: float,
        rest: Rest,
        on_upload_ended: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` times the pages; `now_s` is what ages are counted from."""
        self._clock = clock
        self._engine = engine
        self._counts = counts
        self._day_s = day_s
        self._now_s = now_s
        self._rest = rest
        self._on_upload_ended = on_upload_ended

    def run(self) -> None:
        """Sweep every bucket that has rules. What fails is logged and left to the next sweep."""
        for bucket in self._engine.each_bucket():
            try:
                if not self.sweep_bucket(bucket):
                    return
            except NotFound:
                continue  # deleted meanwhile
            except ObjectCacheError as error:
                self._counts.failures += 1
                logger.warning("lifecycle of bucket %r: %r", bucket.name, error)
        try:
            if not self._sweep_orphans():
                return
        except ObjectCacheError as error:
            self._counts.failures += 1
            logger.warning("parts without an upload: %r", error)
        self._counts.sweeps += 1

    def sweep_bucket(self, bucket: BucketInfo) -> bool:
        """Carry out a bucket's rules; false where the sweep is to end."""
        rules = [rule for rule in bucket.configuration.lifecycle if rule.enabled]
        expiring = [rule for rule in rules if rule.expiration_days is not None]
        for prefix in covering_prefixes(expiring):
            if not self._sweep_keys(
                bucket.name, prefix, partial(self._expire, bucket.name, expiring)
            ):
                return False
        aborting = [rule for rule in rules if rule.abort_uploads_days is not None]
        for prefix in covering_prefixes(aborting):
            uploads_prefix = multipart.uploads_prefix(bucket.name, prefix)
            if not self._sweep_keys(
                multipart.BUCKET, uploads_prefix, partial(self._abort, bucket.name, aborting)
            ):
                return False
        return True

    def _sweep_orphans(self) -> bool:
        """Delete parts whose upload is gone; false where the sweep is to end.

        The parts are looked at first: an upload is open before it has any.
        """
        upload_ids: set[str] = set()

        def note(page: Sequence[ObjectInfo]) -> None:
            upload_ids.update(map(multipart.part_upload_id, page))

        def strike(page: Sequence[ObjectInfo]) -> None:
            upload_ids.difference_update(map(multipart.upload_id_of, page))

        if not self._sweep_keys(multipart.BUCKET, multipart.PARTS_PREFIX, note):
            return False
        if upload_ids and not self._sweep_keys(multipart.BUCKET, multipart.UPLOADS_PREFIX, strike):
            return False
        for upload_id in upload_ids:
            multipart.forget_parts(self._engine, upload_id)
        return True

    def _sweep_keys(
        self, bucket: str, prefix: str, step: Callable[[Sequence[ObjectInfo]], None]
    ) -> bool:
        """Page through the keys, and rest after each as long as its look-up and its step took;
        false where the sweep is to end.
        """
        after: str | None = ""
        while after is not None:
            started_s = self._clock()
            page = self._engine.scan(bucket, prefix, after, PAGE_OBJECTS)
            if page:
                step(page)
            after = page[-1].key if page else None
            if self._rest(self._clock() - started_s):
                return False
        return True

    def _expire(
        self, bucket: str, rules: Sequence[LifecycleRule], page: Sequence[ObjectInfo]
    ) -> None:
        old = [info for info in page if self._is_old(expiration_days(rules, info.key), info)]
        if old:
            gone = self._engine.expire(bucket, old)
            self._counts.expired_objects += gone.object_count
            self._counts.expired_bytes += gone.stored_bytes

    def _abort(
        self, bucket: str, rules: Sequence[LifecycleRule], page: Sequence[ObjectInfo]
    ) -> None:
        for info in page:
            name = multipart.upload_name(bucket, info)
            if self._is_old(abort_days(rules, name.key), info):
                multipart.forget_upload(self._engine, name)
                self._on_upload_ended(name.upload_id)
                self._counts.aborted_uploads += 1

    def _is_old(self, days: int | None, info: ObjectInfo) -> bool:
        return days is not None and info.modified_s + days * self._day_s <= self._now_s


def covering_prefixes(rules: Sequence[LifecycleRule]) -> list[str]:
    """The prefixes of rules, without those that another's covers: no key is looked at twice."""
    prefixes = sorted({rule.prefix for rule in rules})
    kept: list[str] = []
    for prefix in prefixes:
        if not kept or not prefix.startswith(kept[-1]):
            kept.append(prefix)
    return kept


def expiration_days(rules: Sequence[LifecycleRule], key: str) -> int | None:
    """Days after which the first of these expiring rules expires an object; None where none
    covers it.
    """
    return min((rule.expiration_days or 0 for rule in rules if rule.covers(key)), default=None)


def abort_days(rules: Sequence[LifecycleRule], key: str) -> int | None:
    """The same, of aborting rules and an upload."""
    return min((rule.abort_uploads_days or 0 for rule in rules if rule.covers(key)), default=None)


class LifecycleSweeper:
    """Sweeps in a thread of its own, at the start and then each interval, until it is closed."""

    def __init__(
        self,
        engine: Engine,
        counts: LifecycleCounts,
        interval_s: float,
        day_s: float,
        on_upload_ended: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        is_due_here: Callable[[], bool] = lambda: True,
    ) -> None:
        """`on_upload_ended` is called with the id of each upload that was aborted. `is_due_here` is
        asked before each sweep: of several servers of a store one sweeps.
        """
        self._is_due_here = is_due_here
        self.counts = counts
        self._engine = engine
        self._interval_s = interval_s
        self._day_s = day_s
        self._on_upload_ended = on_upload_ended
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="objectcache-lifecycle", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the sweep after its current page. A second call has no effect."""
        self._stopping.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self._is_due_here():
                    self._sweep()
            except ObjectCacheError as error:
                logger.warning("the lifecycle sweep failed: %r", error)
            except Exception:
                logger.exception("the lifecycle sweep failed")
            self._stopping.wait(self._interval_s)

    def _sweep(self) -> None:
        LifecycleSweep(
            self._engine,
            self.counts,
            self._day_s,
            self._clock(),
            self._stopping.wait,
            self._on_upload_ended,
        ).run()

    def __repr__(self) -> str:
        return f"<LifecycleSweeper {self.counts}>"
