"""What the store holds, in memory: objects, extents, free space, and who reads what. One lock.

Space of an extent is given out again only when the index names it no more, nobody reads it, and
nobody who looked it up before it was dropped is still about to read it. For the last of these every
look-up runs inside `looking_up`, and an extent that is dropped waits for the look-ups of its time.

Nothing that waits for the device happens under the lock: every read of the store takes it.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.base import BucketTotals
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.residency.planner import count_reads, resident_bytes
from objectcache_storage_server.engines.local.space.dense_tables import (
    EXTENT_COLUMNS,
    OBJECT_COLUMNS,
    DenseTable,
)
from objectcache_storage_server.engines.local.space.extent_geometry import Geometry, round_up
from objectcache_storage_server.engines.local.space.free_space import Allocator
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Volume

OfObjects = npt.NDArray[np.void]  # rows of OBJECT_COLUMNS
_FRAMED = ("bucket", "extent", "size_bytes")  # of an object that lies in frames


class Holdings:
    """Tables and free space. Methods take the lock themselves unless they say otherwise."""

    def __init__(self, volume: Volume, latch: FlushLatch) -> None:
        self.lock = threading.Lock()
        self._changing_segments = threading.Lock()  # taken before the other, where both are
        self.volume = volume
        self._latch = latch
        self.objects = DenseTable(OBJECT_COLUMNS)
        self.extents = DenseTable(EXTENT_COLUMNS)
        self.allocator = Allocator(volume.segment_bytes)
        self.pitches: dict[int, tuple[int, ...]] = {}  # of extents with encoded slices, a row each
        self.encoded_bytes = 0  # that those extents take
        self.decoded_bytes = 0  # of the slices in them
        self.stored_bytes: dict[int, int] = {}  # by bucket number
        self._object_counts: Counter[int] = Counter()
        # Of live chunks in encoded extents, by bucket number.
        self._frame_bytes: Counter[int] = Counter()
        self._framed_bytes: Counter[int] = Counter()  # decoded
        self.clock_of_uses = 0
        self.resident_bytes = 0  # of extents on the page-cache path
        self.page_cache_budget_bytes = 0  # that they may take
        self.allocated_bytes = 0
        self._lookups: dict[object, int] = {}  # by token, the epoch in which it began
        self._epoch = 0
        self._dropped: list[tuple[int, int]] = []  # extent, epoch in which it was dropped

    # --- opening ---

    def load(self) -> None:
        """Derive from the loaded columns what is not stored.

        Raises `ValueError` where extents overlap or lie outside of the volume.
        """
        for segment in self.volume.segments():
            self.allocator.add_segment(segment)
        extents, objects = self.extents.rows, self.objects.used
        used = self.extents.used
        numbers = np.flatnonzero(used["is_used"])
        self.allocator.take_all(used["offset_bytes"][numbers], used["length_bytes"][numbers])
        self.allocated_bytes = int(used["length_bytes"][numbers].sum())
        self.resident_bytes = resident_bytes(used)
        self._count_encoded(used[used["is_used"] & used["is_encoded"]], 1)
        used["is_cold"][numbers] = IoPath.DIRECT in self.volume.paths
        live = objects[objects["is_used"]]
        np.add.at(extents["live_slots"], live["extent"][live["size_bytes"] > 0], 1)
        # Of an object in several runs the columns name only the first.
        extents["live_slots"][numbers[used["slots"][numbers] == 1]] = 1
        for bucket in np.unique(live["bucket"]):
            of_bucket = live["size_bytes"][live["bucket"] == bucket]
            self.stored_bytes[int(bucket)] = int(of_bucket.sum())
            self._object_counts[int(bucket)] = len(of_bucket)
        in_frames = live[extents["is_encoded"][live["extent"]] & (live["size_bytes"] > 0)]
        places = zip(*(in_frames[name].tolist() for name in _FRAMED), strict=True)
        for bucket, extent, size_bytes in places:
            self._count_frames(bucket, extent, size_bytes)
        self.clock_of_uses = int(live["last_used"].max(initial=0))

    # --- space ---

    def allocate(self, length_bytes: int, path: IoPath, geometry: Geometry | None) -> int | None:
        """A new extent that the index does not name yet, by number; None where no run fits.

        Raises `OSError` where the volume cannot grow for another reason than room, and
        `Unavailable` where a flush has failed.
        """
        length_bytes = round_up(length_bytes)
        number = self._take_extent(length_bytes, path, geometry)
        if number is not None or length_bytes > self.volume.segment_bytes:
            return number
        with self._changing_segments:
            number = self._take_extent(length_bytes, path, geometry)  # another may have extended
            if number is not None:
                return number
            segment = self._new_segment()
            if segment is None:
                return None
            return self._take_extent(length_bytes, path, geometry, segment)

    def _take_extent(
        self,
        length_bytes: int,
        path: IoPath,
        geometry: Geometry | None,
        new_segment: int | None = None,
    ) -> int | None:
        """A new extent in what is free, or first of all in a new segment."""
        with self.lock:
            if new_segment is not None:
                self.allocator.add_segment(new_segment)
            offset_bytes = self.allocator.allocate(length_bytes)
            if offset_bytes is None:
                return None
            number = self.extents.add()
            row = self.extents.rows[number]
            row["offset_bytes"], row["length_bytes"] = offset_bytes, length_bytes
            row["path"] = path
            row["slots"] = 1
            if geometry is not None:
                row["slots"] = geometry.slots
                row["num_layers"], row["slice_bytes"] = geometry.num_layers, geometry.slice_bytes
            row["readers"] = 1  # the writer, until the extent is committed or given back
            self.allocated_bytes += length_bytes
            if path is IoPath.PAGE_CACHE:
                self.resident_bytes += length_bytes
            return number

    def _new_segment(self) -> int | None:
        try:
            return self.volume.extend()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return None
            if error.errno != errno.EIO:  # no flush has failed
                raise
            raise self._latch.end("a new data file", error) from error

    def return_free_segments(self, spare_count: int) -> None:
        """Give segments that hold nothing back to the file system, all but `spare_count`."""
        if not self.volume.gives_segments_back:
            return
        with self._changing_segments:
            segments = self.volume.segments()
            with self.lock:
                free = [number for number in segments if self.allocator.segment_is_free(number)]
            for number in free[spare_count:]:
                self._return_segment(number)

    def _return_segment(self, number: int) -> None:
        with self.lock:
            if not self.allocator.segment_is_free(number):
                return
            self.allocator.remove_segment(number)
        try:
            self.volume.remove(number)
        except OSError:
            with self.lock:
                self.allocator.add_segment(number)
            raise

    def shrink(self, number: int, length_bytes: int) -> None:
        """Give the end of an uncommitted extent back."""
        length_bytes = round_up(length_bytes)
        with self.lock:
            row = self.extents.rows[number]
            over_bytes = int(row["length_bytes"]) - length_bytes
            if over_bytes > 0:
                self.allocator.free(int(row["offset_bytes"]) + length_bytes, over_bytes)
                row["length_bytes"] = length_bytes
                self._count_extent(row, -over_bytes)

    def set_pitches(self, number: int, pitches: tuple[int, ...], codec: int) -> None:
        """The slices of an uncommitted extent, whose length is settled, are frames of these
        pitches, made by a `SliceCodec`.
        """
        with self.lock:
            self.pitches[number] = pitches
            row = self.extents.rows[number]
            row["is_encoded"], row["codec"] = True, codec
            self._count_encoded(row, 1)

    def set_codec(self, number: int, codec: int) -> None:
        """The slices of a plain extent do not get shorter with this `SliceCodec`."""
        with self.lock:
            self.extents.rows["codec"][number] = codec

    def _count_encoded(self, rows: np.void | npt.NDArray[np.void], change: int) -> None:
        slices = rows["num_layers"].astype(np.int64) * rows["slots"]
        self.encoded_bytes += change * int(rows["length_bytes"].astype(np.int64).sum())
        self.decoded_bytes += change * int((slices * rows["slice_bytes"].astype(np.int64)).sum())

    def pitches_of(self, numbers: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Pitches of those extents whose slices are encoded. The caller holds the lock."""
        return {number: self.pitches[number] for number in numbers if number in self.pitches}

    def end_writing(self, number: int, *, keep: bool) -> None:
        """The writer of an extent is through: the index names it now, or it is given back."""
        with self.lock:
            self.extents.rows["readers"][number] -= 1
            if not keep:
                self._drop(number)
            released = self._take_released()
        self._release(released)

    def drop_extents(self, numbers: Iterable[int]) -> None:
        """The index names these no more: their space comes back when the last reader has left."""
        with self.lock:
            for number in numbers:
                self._drop(number)
            released = self._take_released()
        self._release(released)

    def _drop(self, number: int) -> None:
        self.extents.rows["is_freed"][number] = True
        self._epoch += 1
        self._dropped.append((number, self._epoch))

    def _take_released(self) -> list[int]:
        """Dropped extents that nobody waits for, each to be released by this caller alone. The
        caller holds the lock.
        """
        if not self._dropped:
            return []
        oldest = min(self._lookups.values(), default=self._epoch)
        readers = self.extents.rows["readers"]
        released: list[int] = []
        waiting: list[tuple[int, int]] = []
        for number, epoch in self._dropped:
            if readers[number] or epoch > oldest:
                waiting.append((number, epoch))
            else:
                released.append(number)
        self._dropped = waiting
        return released

    def _release(self, numbers: Sequence[int]) -> None:
        """Free the space of extents, once the device has been told that it is nobody's."""
        if not numbers:
            return
        try:
            for offset_bytes, length_bytes in self.ranges(numbers):
                self.volume.discard(offset_bytes, length_bytes)
        finally:
            with self.lock:
                for number in numbers:
                    self._free(number)

    def _free(self, number: int) -> None:
        row = self.extents.rows[number]
        length_bytes = int(row["length_bytes"])
        self.allocator.free(int(row["offset_bytes"]), length_bytes)
        self._count_extent(row, -length_bytes)
        if self.pitches.pop(number, None) is not None:
            self._count_encoded(row, -1)
        self.extents.remove(number)

    def _count_extent(self, row: np.void, change_bytes: int) -> None:
        self.allocated_bytes += change_bytes
        if row["path"] == IoPath.PAGE_CACHE:
            self.resident_bytes += change_bytes

    def set_paths(
        self, numbers: Sequence[int] | npt.NDArray[np.int64], path: IoPath
    ) -> list[tuple[int, int]]:
        """Assign distinct extents to a path; returns the (offset, length) of those that changed."""
        wanted = np.asarray(numbers, np.int64)
        with self.lock:
            rows = self.extents.rows
            changes = rows["is_used"][wanted] & ~rows["is_freed"][wanted]
            changes &= rows["path"][wanted] != path
            changed = wanted[changes]
            rows["path"][changed] = path
            rows["is_cold"][changed] = path is IoPath.PAGE_CACHE
            offsets, lengths = rows["offset_bytes"][changed], rows["length_bytes"][changed]
            changed_bytes = int(lengths.sum())
            self.resident_bytes += changed_bytes if path is IoPath.PAGE_CACHE else -changed_bytes
        return list(zip(offsets.tolist(), lengths.tolist(), strict=True))

    def set_cold(self, number: int, is_cold: bool) -> None:
        """Whether an extent on the page-cache path is to be read past it, since it is not there."""
        with self.lock:
            self.extents.rows["is_cold"][number] = is_cold

    def cold_range(self, number: int) -> tuple[int, int] | None:
        """(offset, length) of an extent that is to be in the page cache and is not; None where that
        is no longer so.
        """
        with self.lock:
            row = self.extents.rows[number]
            is_live = row["is_used"] and not row["is_freed"]
            if not is_live or not row["is_cold"] or row["path"] != IoPath.PAGE_CACHE:
                return None
            return int(row["offset_bytes"]), int(row["length_bytes"])

    # --- readers ---

    @contextlib.contextmanager
    def looking_up(self) -> Generator[None, None, None]:
        """What is looked up in the body may be held in the body."""
        token = object()
        with self.lock:
            self._lookups[token] = self._epoch
        try:
            yield
        finally:
            with self.lock:
                del self._lookups[token]
                released = self._take_released()
            self._release(released)

    def hold(
        self, extents: npt.NDArray[np.int64], reads_of: Sequence[int] = ()
    ) -> npt.NDArray[np.void]:
        """Count a reader into each of these distinct extents; returns copies of their rows.

        `reads_of` has an extent for each object that will be read, which makes it hotter.
        """
        with self.lock:
            rows = self.extents.rows
            rows["readers"][extents] += 1
            count_reads(rows, reads_of)
            return rows[extents]

    def use_alone(self, version: Version) -> tuple[int, IoPath] | None:
        """Where an object that shares its one extent with none lies in the volume, and by which
        path it is read; None for any other. Counts as a use. To be called inside of `looking_up`,
        and so is the read.
        """
        if len(version.extents) != 1:
            return None
        (extent,) = version.extents
        with self.lock:
            home, row = self.extents.rows[extent], self.objects.rows[version.number]
            if home["slots"] != 1 or home["is_encoded"]:
                return None
            self.clock_of_uses += 1
            if row["is_used"] and row["serial"] == version.serial:
                row["last_used"] = self.clock_of_uses
            home["heat"] += np.float32(1)
            return int(home["offset_bytes"]), IoPath(int(home["path"]))

    def let_go(self, extents: npt.NDArray[np.int64]) -> None:
        """Count the reader out."""
        with self.lock:
            self.extents.rows["readers"][extents] -= 1
            released = self._take_released()
        self._release(released)

    # --- objects ---

    def used(self, versions: Sequence[Version], *, are_prefix: bool) -> None:
        """These were read just now; in a prefix, each is the parent of the next."""
        numbers = np.fromiter((version.number for version in versions), np.int64, len(versions))
        serials = np.fromiter((version.serial for version in versions), np.uint64, len(versions))
        with self.lock:
            self.clock_of_uses += 1
            objects = self.objects.rows
            # A number may be another object's by now.
            is_same = objects["is_used"][numbers] & (objects["serial"][numbers] == serials)
            objects["last_used"][numbers[is_same]] = self.clock_of_uses
            if are_prefix and len(numbers) > 1:
                linked = is_same[1:] & is_same[:-1]
                children, parents = numbers[1:][linked], numbers[:-1][linked]
                unknown = objects["parent_hash"][children] == 0
                hashes = objects["own_hash"][parents]
                objects["parent_hash"][children[unknown]] = hashes[unknown]

    def new_object_rows(self, count: int) -> tuple[list[int], npt.NDArray[np.void]]:
        """Numbers for objects that are about to be stored, and their blank rows, as a copy."""
        with self.lock:
            numbers = [self.objects.add() for _ in range(count)]
            for number in numbers:
                self.objects.rows["is_used"][number] = False  # nobody's before `store`
            rows = np.zeros(count, OBJECT_COLUMNS)
            rows["is_used"] = True
            return numbers, rows

    def give_back_objects(self, numbers: Sequence[int]) -> None:
        """These numbers were not stored after all."""
        with self.lock:
            for number in numbers:
                self.objects.rows["is_used"][number] = True
                self.objects.remove(number)

    def store(self, versions: Sequence[Version], rows: npt.NDArray[np.void]) -> None:
        """The index names these now."""
        with self.lock:
            self.clock_of_uses += 1
            rows["last_used"] = self.clock_of_uses
            numbers = [version.number for version in versions]
            self.objects.rows[numbers] = rows
            live = self.extents.rows["live_slots"]
            for version in versions:
                self._count(version.bucket_number, 1, version.info.size_bytes)
                self._count_frames_of(version, 1)
                for number in version.extents:
                    live[number] += 1

    def move(self, new: Sequence[Version], old: Sequence[Version], rows: OfObjects) -> None:
        """The index names `new`, with these rows, in place of `old`; same objects, same order."""
        with self.lock:
            live, objects = self.extents.rows["live_slots"], self.objects.rows
            for version, before, row in zip(new, old, rows, strict=True):
                for column in ("extent", "slot", "serial"):
                    objects[column][version.number] = row[column]
                live[list(before.extents)] -= 1
                live[list(version.extents)] += 1
                self._count_frames_of(before, -1)
                self._count_frames_of(version, 1)

    def forget(self, versions: Sequence[Version]) -> None:
        """The index names these no more."""
        with self.lock:
            live = self.extents.rows["live_slots"]
            for version in versions:
                self.objects.remove(version.number)
                self._count(version.bucket_number, -1, -version.info.size_bytes)
                self._count_frames_of(version, -1)
                for number in version.extents:
                    live[number] -= 1

    def forget_lost(self, numbers: Sequence[int]) -> list[int]:
        """The index has lost these, and what it knew of them; returns the extents that nobody
        lives in now. Of an object in several runs that is the first: a check finds the others.
        """
        empty: list[int] = []
        with self.lock:
            objects = self.objects.rows
            for number in numbers:
                if number >= len(self.objects.used) or not objects["is_used"][number]:
                    continue
                row = objects[number].copy()
                self.objects.remove(number)
                bucket, size_bytes = int(row["bucket"]), int(row["size_bytes"])
                self._count(bucket, -1, -size_bytes)
                if size_bytes:
                    self._count_frames(bucket, int(row["extent"]), -size_bytes)
                if size_bytes and not self._count_live(int(row["extent"])):
                    empty.append(int(row["extent"]))
        return empty

    def _count_live(self, extent: int) -> int:
        """Count who lives in an extent anew."""
        objects = self.objects.used
        lives = objects["is_used"] & (objects["extent"] == extent) & (objects["size_bytes"] > 0)
        count = int(lives.sum())
        self.extents.rows["live_slots"][extent] = count
        return count

    def emptied_by(self, versions: Sequence[Version]) -> list[int]:
        """Extents in which nobody lives but these versions."""
        leaving = Counter(number for version in versions for number in version.extents)
        with self.lock:
            live = self.extents.rows["live_slots"]
            return [number for number, count in leaving.items() if live[number] == count]

    def _count(self, bucket: int, change: int, change_bytes: int) -> None:
        self._object_counts[bucket] += change
        self.stored_bytes[bucket] = self.stored_bytes.get(bucket, 0) + change_bytes

    def _count_frames_of(self, version: Version, change: int) -> None:
        if version.extents:
            size_bytes = change * version.info.size_bytes
            self._count_frames(version.bucket_number, version.extents[0], size_bytes)

    def _count_frames(self, bucket: int, extent: int, change_bytes: int) -> None:
        """A chunk of so many bytes, fewer than 0 where it goes, in an extent of whichever kind."""
        pitches = self.pitches.get(extent)
        if pitches is not None:
            self._frame_bytes[bucket] += sum(pitches) if change_bytes > 0 else -sum(pitches)
            self._framed_bytes[bucket] += change_bytes

    def totals(self, bucket: int) -> BucketTotals:
        """What a bucket holds, by its number."""
        with self.lock:
            return BucketTotals(
                self._object_counts[bucket],
                self.stored_bytes.get(bucket, 0),
                self._frame_bytes[bucket],
                self._framed_bytes[bucket],
            )

    def slots_of(self, extents: Iterable[int]) -> list[int]:
        """Slots of extents, in no order."""
        with self.lock:
            slots: list[int] = self.extents.rows["slots"][list(extents)].tolist()
            return slots

    def object_rows(self, numbers: Sequence[int]) -> OfObjects:
        """Copies of the rows of objects."""
        with self.lock:
            return self.objects.rows[list(numbers)]

    def set_pinned(self, numbers: Sequence[int], pinned: bool) -> None:
        """Whether an operator keeps these objects."""
        with self.lock:
            self.objects.rows["is_pinned"][numbers] = pinned

    # --- views ---

    def ranges(self, extents: Sequence[int], path: IoPath | None = None) -> list[tuple[int, int]]:
        """(offset, length) of extents, of those on one path if it is given."""
        with self.lock:
            rows = self.extents.rows[list(extents)]
            if path is not None:
                rows = rows[rows["path"] == path]
            offsets, lengths = rows["offset_bytes"].tolist(), rows["length_bytes"].tolist()
        return list(zip(offsets, lengths, strict=True))

    def snapshot(self) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """Copies of all object and extent rows, for decisions that take their time."""
        with self.lock:
            return self.objects.used.copy(), self.extents.used.copy()

    def capacity_bytes(self) -> int:
        """What extents may take: the segments, and those that could be added."""
        with self._changing_segments:  # a segment on its way would not be counted
            room_bytes = self.volume.room_bytes()
            with self.lock:
                return self.allocated_bytes + self.allocator.free_bytes + room_bytes

    def describe_room(self) -> str:
        """How much room there is, in words for an error."""
        with self.lock:
            free_bytes = self.allocator.free_bytes
            largest_bytes = self.allocator.largest_free_bytes
        return (
            f"{self.allocated_bytes} bytes are taken, {free_bytes} free ({largest_bytes} in one "
            f"run), {self.volume.room_bytes()} could be added"
        )
