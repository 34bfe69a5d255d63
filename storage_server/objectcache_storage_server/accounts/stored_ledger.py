"""Quotas of stored bytes and objects: what is stored, and what puts under way may add to it.

A put reserves its size before it asks for data, and keeps that until what it has stored shows in
the engine's counters. Both are read under one lock, so stored and reserved together never exceed a
quota, in whatever order puts go on. What a put replaces is not set off: the old object is there
until the new one is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import NamedTuple

from objectcache_schemas.errors import NotFound, StorageFull
from objectcache_schemas.records import BucketInfo, Quota
from objectcache_storage_server.accounts.quota_book import QuotaBook
from objectcache_storage_server.engines.base import BucketTotals


class Holding(NamedTuple):
    """What a bucket or a user has, stored and reserved."""

    object_count: int = 0
    stored_bytes: int = 0

    def plus(self, object_count: int, stored_bytes: int) -> Holding:
        """With more, or with less where the numbers are negative."""
        return Holding(self.object_count + object_count, self.stored_bytes + stored_bytes)


NOTHING = Holding()


class Reservation:
    """Room that a put under way has."""

    def __init__(self, ledger: StoredLedger, bucket: BucketInfo) -> None:
        self._ledger = ledger
        self.bucket = bucket
        self.object_count = 0
        self.held = NOTHING

    def confirm(self, size_bytes: int) -> None:
        """Reserve `object_count` objects and so many bytes, in place of what was reserved.

        Said before data is asked for, and again before the commit, when the size is known. Raises
        `StorageFull` (QuotaExceeded) naming the quota; then nothing has changed.
        """
        self._ledger.change(self, Holding(self.object_count, size_bytes))


class StoredLedger:
    """What all puts have reserved. Safe from any thread; `reserving` may block on the engine."""

    def __init__(self, quotas: QuotaBook, totals: Callable[[str], BucketTotals]) -> None:
        """`totals` tells what a bucket holds; raises `NotFound` for one that is gone."""
        self._quotas = quotas
        self._totals = totals
        self._lock = threading.Lock()
        self._reserved: dict[str, Holding] = {}  # by bucket
        self._parts: dict[str, tuple[str, dict[int, int]]] = {}  # upload: bucket, bytes by part
        self._part_bytes: dict[str, int] = {}  # of open uploads, by bucket

    def may_block(self, bucket: BucketInfo) -> bool:
        """Whether a reservation has to look at what may lie on a device."""
        quota = self._quotas.known_of_bucket(bucket.name)
        return quota is None or _limits(quota) or _limits(self._quotas.of_user(bucket.owner))

    @contextmanager
    def reserving(
        self, bucket: BucketInfo, object_count: int, stored_bytes: int
    ) -> Generator[Reservation]:
        """Have room for the length of the block, which ends after the commit.

        Raises `StorageFull` (QuotaExceeded) naming the quota.
        """
        reservation = self.empty(bucket)
        reservation.object_count = object_count
        try:
            reservation.confirm(stored_bytes)
            yield reservation
        finally:
            self.release(reservation)

    def empty(self, bucket: BucketInfo) -> Reservation:
        """A reservation of nothing yet; `release` ends it."""
        return Reservation(self, bucket)

    def release(self, reservation: Reservation) -> None:
        """The put is over, stored or not. A second call has no effect."""
        with self._lock:
            self._set(reservation, NOTHING)

    def change(self, reservation: Reservation, wanted: Holding) -> None:
        """See `Reservation.confirm`."""
        bucket = reservation.bucket
        user_quota = self._quotas.of_user(bucket.owner)
        bucket_quota = self._quotas.of_bucket(bucket.name)
        with self._lock:
            before = reservation.held
            self._set(reservation, NOTHING)
            try:
                if _limits(bucket_quota):
                    _check("bucket", bucket.name, bucket_quota, self._held([bucket.name]), wanted)
                if _limits(user_quota):
                    held = self._held(self._quotas.buckets_of(bucket.owner))
                    _check("user", bucket.owner, user_quota, held, wanted)
            except BaseException:
                self._set(reservation, before)
                raise
            self._set(reservation, wanted)

    def _set(self, reservation: Reservation, held: Holding) -> None:
        name = reservation.bucket.name
        before = reservation.held
        found = self._reserved.get(name, NOTHING)
        found = found.plus(-before.object_count, -before.stored_bytes).plus(*held)
        if found == NOTHING:
            self._reserved.pop(name, None)
        else:
            self._reserved[name] = found
        reservation.held = held

    def _held(self, buckets: Iterable[str]) -> Holding:
        """What buckets hold, with what is reserved in them and with the parts of open uploads."""
        found = NOTHING
        for name in buckets:
            try:
                totals = self._totals(name)
            except NotFound:
                continue
            found = found.plus(totals.object_count, totals.stored_bytes)
            found = found.plus(*self._reserved.get(name, NOTHING))
            found = found.plus(0, self._part_bytes.get(name, 0))
        return found

    # --- parts of open uploads, which are in no bucket yet ---

    def part_stored(self, bucket: str, upload_id: str, part_number: int, size_bytes: int) -> None:
        """A part of an open upload is stored, in place of one of the same number."""
        with self._lock:
            _, parts = self._parts.setdefault(upload_id, (bucket, {}))
            self._add_part_bytes(bucket, size_bytes - parts.get(part_number, 0))
            parts[part_number] = size_bytes

    def upload_ended(self, upload_id: str) -> None:
        """An upload and its parts are gone. Called after what was made of them can be counted."""
        with self._lock:
            bucket, parts = self._parts.pop(upload_id, ("", {}))
            self._add_part_bytes(bucket, -sum(parts.values()))

    def bucket_deleted(self, bucket: str) -> None:
        """A bucket is gone with its uploads."""
        with self._lock:
            for upload_id in [one for one, known in self._parts.items() if known[0] == bucket]:
                del self._parts[upload_id]
            self._part_bytes.pop(bucket, None)

    def _add_part_bytes(self, bucket: str, more_bytes: int) -> None:
        part_bytes = self._part_bytes.get(bucket, 0) + more_bytes
        if part_bytes:
            self._part_bytes[bucket] = part_bytes
        else:
            self._part_bytes.pop(bucket, None)

    def __repr__(self) -> str:
        return f"<StoredLedger {len(self._reserved)} buckets with puts, {len(self._parts)} uploads>"


def _limits(quota: Quota) -> bool:
    return quota.stored_bytes is not None or quota.object_count is not None


def _check(what: str, name: str, quota: Quota, held: Holding, more: Holding) -> None:
    total_bytes = held.stored_bytes + more.stored_bytes
    if quota.stored_bytes is not None and total_bytes > quota.stored_bytes:
        raise _exceeded(
            f"{what} {name} may store {quota.stored_bytes} bytes, and would hold {total_bytes}",
            "stored_bytes",
        )
    total = held.object_count + more.object_count
    if quota.object_count is not None and total > quota.object_count:
        raise _exceeded(
            f"{what} {name} may store {quota.object_count} objects, not {total}", "object_count"
        )


def _exceeded(message: str, quota: str) -> StorageFull:
    return StorageFull(
        f"{message}; delete some, or raise the quota", code="QuotaExceeded", quota=quota
    )
