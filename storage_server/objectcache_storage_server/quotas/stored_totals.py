"""Running totals of what buckets and their owners hold. Pure; whoever calls holds a lock.

A bucket's `counted` is never below what the engine would say, as long as whoever stores has its
room pending meanwhile: what was pending moves to it when the put ends, whatever the put replaced,
and a reading of the engine's counter takes its place later. So an owner's total may be too large
for a while, where it is read again, and is never too small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from objectcache_schemas.records import BucketInfo


class Holding(NamedTuple):
    """What a bucket or a user has, stored and reserved."""

    object_count: int = 0
    stored_bytes: int = 0

    def plus(self, other: Holding) -> Holding:
        """Both together."""
        return Holding(
            self.object_count + other.object_count, self.stored_bytes + other.stored_bytes
        )

    def minus(self, other: Holding) -> Holding:
        """This without another."""
        return Holding(
            self.object_count - other.object_count, self.stored_bytes - other.stored_bytes
        )


NOTHING = Holding()


@dataclass(slots=True, eq=False)
class OwnerTally:
    """What all buckets of one user hold."""

    total: Holding = NOTHING  # counted and pending
    buckets: dict[str, BucketTally] = field(default_factory=dict[str, "BucketTally"])
    uncounted: set[str] = field(default_factory=set[str])  # whose counters were never read
    stale: set[str] = field(default_factory=set[str])  # that may hold less than is counted
    recount_after_s: float = 0.0


@dataclass(slots=True, eq=False)
class BucketTally:
    """What one bucket holds."""

    name: str
    owner: OwnerTally
    owner_name: str = ""
    counted: Holding = NOTHING  # as the engine said, and what was stored since
    pending: Holding = NOTHING  # of puts under way and open uploads
    added: Holding = NOTHING  # all that ever moved from pending to counted
    changes: int = 0
    is_gone: bool = False

    @property
    def total(self) -> Holding:
        """Counted and pending."""
        return self.counted.plus(self.pending)


class Reading(NamedTuple):
    """A tally when the engine's counter began to be read."""

    tally: BucketTally
    added: Holding
    changes: int


class StoredTotals:
    """The tallies of all buckets, with their owners' sums."""

    def __init__(self, buckets: Iterable[BucketInfo] = ()) -> None:
        self._buckets: dict[str, BucketTally] = {}
        self._owners: dict[str, OwnerTally] = {}
        for bucket in buckets:
            self.begin(bucket)

    def begin(self, info: BucketInfo) -> None:
        """There is a bucket more."""
        assert info.name not in self._buckets
        owner = self._owners.setdefault(info.owner, OwnerTally())
        tally = self._buckets[info.name] = BucketTally(info.name, owner, info.owner)
        owner.buckets[info.name] = tally
        owner.uncounted.add(info.name)

    def find(self, name: str) -> BucketTally | None:
        """A bucket's tally."""
        return self._buckets.get(name)

    def bucket(self, name: str) -> BucketTally:
        """The same; of a bucket that is gone, one that counts for nobody."""
        return self._buckets.get(name) or BucketTally(name, OwnerTally(), is_gone=True)

    def bucket_count(self, owner: str) -> int:
        """How many buckets a user has."""
        found = self._owners.get(owner)
        return len(found.buckets) if found is not None else 0

    def drop(self, name: str) -> None:
        """A bucket is gone. What goes on with its tally counts for nobody."""
        tally = self._buckets.pop(name, None)
        if tally is None:
            return
        known = tally.owner
        known.total = known.total.minus(tally.total)
        del known.buckets[name]
        known.uncounted.discard(name)
        known.stale.discard(name)
        if not known.buckets:
            self._owners.pop(tally.owner_name, None)
        tally.owner, tally.is_gone = OwnerTally(), True

    def names(self) -> set[str]:
        """Of all buckets."""
        return set(self._buckets)

    def pend(self, tally: BucketTally, more: Holding) -> None:
        """More is under way in a bucket."""
        tally.pending = tally.pending.plus(more)
        tally.owner.total = tally.owner.total.plus(more)

    def unpend(self, tally: BucketTally, less: Holding) -> None:
        """What was under way is not stored."""
        tally.pending = tally.pending.minus(less)
        tally.owner.total = tally.owner.total.minus(less)

    def store(self, tally: BucketTally, held: Holding) -> None:
        """What was under way is stored, or less of it."""
        tally.pending = tally.pending.minus(held)
        tally.counted = tally.counted.plus(held)
        tally.added = tally.added.plus(held)
        self.shrunk(tally)

    def shrunk(self, tally: BucketTally) -> None:
        """A bucket may hold less than is counted."""
        tally.changes += 1
        tally.owner.stale.add(tally.name)

    def begin_reading(self, tally: BucketTally) -> Reading:
        """Said before the engine's counter is read."""
        return Reading(tally, tally.added, tally.changes)

    def end_reading(self, reading: Reading, read: Holding) -> None:
        """What the counter said. What was stored since the reading began may be in it or not."""
        tally = reading.tally
        before = tally.counted
        tally.counted = read.plus(tally.added.minus(reading.added))
        tally.owner.total = tally.owner.total.plus(tally.counted.minus(before))
        tally.owner.uncounted.discard(tally.name)
        if tally.changes == reading.changes:
            tally.owner.stale.discard(tally.name)

    def __repr__(self) -> str:
        return f"<StoredTotals {len(self._buckets)} buckets of {len(self._owners)}>"
