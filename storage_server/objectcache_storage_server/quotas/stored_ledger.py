"""Quotas of stored bytes and objects: what is stored, and what puts under way may add to it.

A put reserves its size before it asks for data, and keeps that until it has ended. Running totals
tell what a bucket and its owner have, so a put that fits costs the same whatever they hold. Where
it seems not to fit, the engine's counters say what is really stored. What a put replaces is not set
off: the old object is there until the new one is. An open upload is an object, and has its parts'
bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from objectcache_schemas.errors import NotFound, StorageFull
from objectcache_schemas.records import BucketInfo, Quota
from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.quotas.quota_book import QuotaBook
from objectcache_storage_server.quotas.stored_totals import (
    NOTHING,
    BucketTally,
    Holding,
    StoredTotals,
)

OBJECT = Holding(1, 0)
RECOUNT_REST = 10.0  # times as long as a recount took, before the same owner's buckets are again


class Reservation:
    """Room that a put under way has."""

    def __init__(self, ledger: StoredLedger, bucket: BucketInfo) -> None:
        self._ledger = ledger
        self.bucket = bucket
        self.object_count = 0
        self.held = NOTHING
        self.tally: BucketTally | None = None  # that `held` is pending in

    def confirm(self, size_bytes: int) -> None:
        """Reserve `object_count` objects and so many bytes, in place of what was reserved.

        Said before data is asked for, and again before the commit, when the size is known. Blocks.
        Raises `StorageFull` (QuotaExceeded) naming the quota; then nothing has changed.
        """
        self._ledger.change(self, Holding(self.object_count, size_bytes))

    def confirm_known(self, size_bytes: int) -> bool:
        """The same by what is known, without blocking; false where `confirm` has to look."""
        return self._ledger.change_known(self, Holding(self.object_count, size_bytes))


@dataclass(slots=True)
class _Upload:
    """An open upload, which is in no bucket yet."""

    bucket: BucketInfo
    tally: BucketTally
    part_bytes: dict[int, int] = field(default_factory=dict[int, int])
    held: Holding = OBJECT  # and the bytes of all parts


class StoredLedger:
    """What all puts have reserved. Safe from any thread; `change` may block on the engine.

    The lock is held for a few steps in memory only, since the event loop takes it.
    """

    def __init__(
        self,
        quotas: QuotaBook,
        totals: Callable[[str], BucketTotals],
        buckets: Iterable[BucketInfo] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        is_shared: bool = False,
    ) -> None:
        """`totals` tells what a bucket holds; raises `NotFound` for one that is gone. `buckets` are
        those there are; `bucket_created` tells of more. `is_shared`: others store into the same
        buckets, so what is stored is asked each time that a quota may refuse.
        """
        self._is_shared = is_shared
        self._quotas = quotas
        self._totals = totals
        self._clock = clock
        self._lock = threading.Lock()
        self._tallies = StoredTotals(buckets)
        self._uploads: dict[str, _Upload] = {}

    # --- puts ---

    @contextmanager
    def reserving(
        self, bucket: BucketInfo, object_count: int, stored_bytes: int
    ) -> Generator[Reservation]:
        """Have room for the length of the block, which ends after the commit. Blocks.

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
            self._settle(reservation)

    def change(self, reservation: Reservation, wanted: Holding) -> None:
        """See `Reservation.confirm`."""
        bucket = reservation.bucket
        user_quota = self._quotas.of_user(bucket.owner)
        bucket_quota = self._quotas.of_bucket(bucket.name)
        if self._is_shared:
            self._read(self._of_owner(bucket) if _limits(user_quota) else [bucket.name])
        else:
            self._read_uncounted(bucket, whole_owner=_limits(user_quota))
        refusal = self._try(reservation, wanted, bucket_quota, user_quota)
        if refusal is None:
            return
        self._read(self._stale(bucket))
        refusal = self._try(reservation, wanted, bucket_quota, user_quota)
        if refusal is not None and self._recount(bucket):
            refusal = self._try(reservation, wanted, bucket_quota, user_quota)
        if refusal is not None:
            raise refusal

    def change_known(self, reservation: Reservation, wanted: Holding) -> bool:
        """See `Reservation.confirm_known`."""
        bucket = reservation.bucket
        user_quota = self._quotas.of_user(bucket.owner)
        bucket_quota = self._quotas.known_of_bucket(bucket.name)
        if bucket_quota is None:
            return False
        if self._is_shared and (_limits(user_quota) or _limits(bucket_quota)):
            return False
        with self._lock:
            owner = self._tallies.bucket(bucket.name).owner
            if _limits(user_quota) and owner.uncounted:
                return False
            if _limits(bucket_quota) and bucket.name in owner.uncounted:
                return False
        return self._try(reservation, wanted, bucket_quota, user_quota) is None

    def _try(
        self, reservation: Reservation, wanted: Holding, bucket_quota: Quota, user_quota: Quota
    ) -> StorageFull | None:
        """Have `wanted` reserved if it fits by what is counted; else why it does not."""
        bucket = reservation.bucket
        with self._lock:
            tally = self._tallies.bucket(bucket.name)
            before = reservation.held if reservation.tally is tally else NOTHING
            refusal = _refusal(
                "bucket", bucket.name, bucket_quota, tally.total.minus(before), wanted
            ) or _refusal("user", bucket.owner, user_quota, tally.owner.total.minus(before), wanted)
            if refusal is None:
                self._tallies.unpend(tally, before)
                self._tallies.pend(tally, wanted)
                reservation.tally, reservation.held = tally, wanted
        return refusal

    def _settle(self, reservation: Reservation) -> None:
        """What was reserved is stored by now, or part of it is."""
        tally, held = reservation.tally, reservation.held
        reservation.tally, reservation.held = None, NOTHING
        if tally is None or held == NOTHING:
            return
        self._tallies.store(tally, held)
        again = self._tallies.find(reservation.bucket.name) if tally.is_gone else None
        if again is not None:  # the bucket was deleted and made again meanwhile
            self._tallies.pend(again, held)
            self._tallies.store(again, held)

    # --- what is really stored ---

    def _read_uncounted(self, bucket: BucketInfo, *, whole_owner: bool) -> None:
        with self._lock:
            uncounted = self._tallies.bucket(bucket.name).owner.uncounted
            names = list(uncounted) if whole_owner else list(uncounted & {bucket.name})
        self._read(names)

    def _of_owner(self, bucket: BucketInfo) -> list[str]:
        """All buckets of the same owner."""
        with self._lock:
            return list(self._tallies.bucket(bucket.name).owner.buckets)

    def _stale(self, bucket: BucketInfo) -> list[str]:
        """The bucket, and those of its owner that may hold less than is counted."""
        with self._lock:
            return list(self._tallies.bucket(bucket.name).owner.stale | {bucket.name})

    def _recount(self, bucket: BucketInfo) -> bool:
        """Read the counters of all the owner's buckets, because objects also go by themselves;
        false where that was done just now.
        """
        begun_s = self._clock()
        with self._lock:
            owner = self._tallies.bucket(bucket.name).owner
            if begun_s < owner.recount_after_s:
                return False
            owner.recount_after_s = float("inf")
            names = list(owner.buckets)
        try:
            self._read(names)
        finally:
            ended_s = self._clock()
            owner.recount_after_s = ended_s + RECOUNT_REST * (ended_s - begun_s)
        return True

    def _read(self, names: Iterable[str]) -> None:
        """Ask the engine what buckets hold."""
        for name in names:
            with self._lock:
                tally = self._tallies.find(name)
                if tally is None:
                    continue
                reading = self._tallies.begin_reading(tally)
            try:
                totals = self._totals(name)
                read = Holding(totals.object_count, totals.stored_bytes)
            except NotFound:
                read = NOTHING
            with self._lock:
                self._tallies.end_reading(reading, read)

    def shrunk(self, bucket: str) -> None:
        """Objects of a bucket were deleted."""
        with self._lock:
            tally = self._tallies.find(bucket)
            if tally is not None:
                self._tallies.shrunk(tally)

    # --- buckets ---

    def bucket_created(self, bucket: BucketInfo) -> None:
        """A bucket is about to be made; `bucket_deleted` where that fails."""
        with self._lock:
            if self._is_shared:  # another server may have deleted the one of this name
                self._tallies.drop(bucket.name)
            self._tallies.begin(bucket)

    def set_buckets(self, buckets: Iterable[BucketInfo]) -> None:
        """These are all that there are: other servers have made and deleted some."""
        found = {bucket.name: bucket for bucket in buckets}
        with self._lock:
            for name in self._tallies.names() - found.keys():
                self._tallies.drop(name)
            for name in found.keys() - self._tallies.names():
                self._tallies.begin(found[name])

    def bucket_deleted(self, bucket: BucketInfo) -> None:
        """A bucket is gone with its uploads."""
        with self._lock:
            for upload_id, upload in list(self._uploads.items()):
                if upload.bucket.name == bucket.name:
                    del self._uploads[upload_id]
            self._tallies.drop(bucket.name)

    def bucket_count(self, owner: str) -> int:
        """How many buckets a user has."""
        with self._lock:
            return self._tallies.bucket_count(owner)

    # --- open uploads ---

    def upload_opened(self, bucket: BucketInfo, upload_id: str) -> None:
        """An upload is open. What was reserved for it may be released now."""
        with self._lock:
            tally = self._tallies.find(bucket.name)
            if tally is not None and upload_id not in self._uploads:
                upload = self._uploads[upload_id] = _Upload(bucket, tally)
                self._tallies.pend(tally, upload.held)

    def part_stored(self, upload_id: str, part_number: int, size_bytes: int) -> None:
        """A part is stored, in place of one of the same number. Of an upload that is not open any
        more there are none.
        """
        with self._lock:
            upload = self._uploads.get(upload_id)
            if upload is not None:
                more = Holding(0, size_bytes - upload.part_bytes.get(part_number, 0))
                upload.part_bytes[part_number] = size_bytes
                upload.held = upload.held.plus(more)
                self._tallies.pend(upload.tally, more)

    def not_stored(self, reservation: Reservation) -> None:
        """What was reserved is not in the bucket: the put failed, or is counted as a part."""
        with self._lock:
            if reservation.tally is not None:
                self._tallies.unpend(reservation.tally, reservation.held)
            reservation.tally, reservation.held = None, NOTHING

    def upload_ended(self, upload_id: str, *, is_joined: bool = False) -> None:
        """An upload and its parts are gone, into an object or for good."""
        with self._lock:
            upload = self._uploads.pop(upload_id, None)
            if upload is None:
                return
            if is_joined:
                self._tallies.store(upload.tally, upload.held)
            else:
                self._tallies.unpend(upload.tally, upload.held)

    def __repr__(self) -> str:
        return f"<StoredLedger {self._tallies!r}, {len(self._uploads)} uploads>"


def _limits(quota: Quota) -> bool:
    return quota.stored_bytes is not None or quota.object_count is not None


def _refusal(
    what: str, name: str, quota: Quota, held: Holding, more: Holding
) -> StorageFull | None:
    total = held.plus(more)
    if quota.stored_bytes is not None and total.stored_bytes > quota.stored_bytes:
        return _exceeded(
            f"{what} {name} may store {quota.stored_bytes} bytes, and would hold "
            f"{total.stored_bytes}",
            "stored_bytes",
        )
    if quota.object_count is not None and total.object_count > quota.object_count:
        return _exceeded(
            f"{what} {name} may store {quota.object_count} objects, not {total.object_count}",
            "object_count",
        )
    return None


def _exceeded(message: str, quota: str) -> StorageFull:
    return StorageFull(
        f"{message}; delete some, or raise the quota", code="QuotaExceeded", quota=quota
    )
