"""Reading the log: where records lie, and which follow; see `rados_log.py`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from objectcache_schemas.errors import DamagedData, Unavailable
from objectcache_schemas.limits import KIB
from objectcache_storage_server.engines.stores.rados.log_frames import (
    FRAME_HEAD_BYTES,
    OBJECT_BYTES_MAX,
    RECORD_BYTES_MAX,
    Frame,
    LogEnd,
    Position,
    first_number,
    frame_bytes,
    parse_frames,
)
from objectcache_storage_server.engines.stores.rados.log_objects import HeadView, LogObjects
from objectcache_storage_server.engines.stores.shared_store import LostObject, TrimmedLog

FIRST_READ_BYTES = 16 * KIB  # of the head, before it is known how much there is


class LogReader:
    """Reads records. Who follows the log needs one small operation a time."""

    def __init__(self, objects: LogObjects) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._next: Position | None = None  # where the last read ended

    def read(self, first: int, size_bytes_max: int, deadline_s: float) -> list[bytes]:
        """See `SharedStore.read_log`."""
        records: list[bytes] = []
        left_bytes, end = size_bytes_max, first + 1
        while first + len(records) < end and (left_bytes > 0 or not records):
            frames, end = self.frames(first + len(records), left_bytes, deadline_s)
            for frame in frames:
                if records and len(frame.record) > left_bytes:
                    return records
                records.append(frame.record)
                left_bytes -= len(frame.record)
        return records

    def frames(
        self, first: int, wanted_bytes: int, deadline_s: float
    ) -> tuple[Sequence[Frame], int]:
        """Frames from record `first` on, or none where the log ends there: those of one object,
        about as much as is wanted and at least one. And the number of the next record of the log.
        """
        with self._lock:
            known = self._next if self._next and self._next.number == first else None
        view = self._objects.look(deadline_s, known, FIRST_READ_BYTES)
        if first < view.kept.floor:
            raise TrimmedLog(view.kept.floor)
        if first >= view.end.number:
            return [], view.end.number
        try:
            at, data = known or self._find(first, view, deadline_s), view.data
            is_whole = at.segment == view.end.segment and (
                at.offset_bytes + len(data) == view.end.offset_bytes
            )
            if not is_whole:
                at, data = self._read_frames(at, view.end, wanted_bytes, deadline_s)
        except LostObject as error:
            floor = self._objects.look(deadline_s).kept.floor
            if first < floor:
                raise TrimmedLog(floor) from error
            raise Unavailable(f"record {first} of the log cannot be found: {error}") from error
        frames = parse_frames(data, first)
        after = at.offset_bytes + sum(frame.size_bytes for frame in frames)
        with self._lock:
            self._next = Position(first + len(frames), at.segment, after)
        return frames, view.end.number

    def _read_frames(
        self, at: Position, end: LogEnd, wanted_bytes: int, deadline_s: float
    ) -> tuple[Position, memoryview]:
        """Bytes with at least the frame at a position, which may be the end of a segment; and
        where they lie.
        """
        size_bytes = FRAME_HEAD_BYTES + min(max(wanted_bytes, FIRST_READ_BYTES), RECORD_BYTES_MAX)
        if at.segment == end.segment:  # behind the end are zeros, as many as are asked for
            size_bytes = min(size_bytes, end.offset_bytes - at.offset_bytes)
        data = self._objects.read(at, end, size_bytes, deadline_s)
        if not data:
            at = Position(at.number, at.segment + 1, 0)
            data = self._objects.read(at, end, size_bytes, deadline_s)
        whole_bytes = frame_bytes(data, at.number)
        if whole_bytes > len(data):
            data = self._objects.read(at, end, whole_bytes, deadline_s)
        if whole_bytes > len(data):
            raise DamagedData(f"the log's record {at.number} is cut off")
        return at, data

    def _find(self, first: int, view: HeadView, deadline_s: float) -> Position:
        """Where a record begins that was not read last, by going through the object it is in."""
        segment = self.segment_of(first, view, deadline_s)
        data = self._objects.read(
            Position(first, segment, 0), view.end, OBJECT_BYTES_MAX, deadline_s
        )
        number = first_number(data)
        offset_bytes = 0
        while number < first:
            offset_bytes += frame_bytes(data[offset_bytes:], number)
            number += 1
        return Position(first, segment, offset_bytes)

    def segment_of(self, number: int, view: HeadView, deadline_s: float) -> int:
        """The segment, or the head, in which a record lies that is not below the floor."""
        if number >= view.end.first:
            return view.end.segment
        low, high = view.kept.segment, view.end.segment - 1
        while low < high:
            middle = (low + high + 1) // 2
            try:
                is_after = self.first_of(middle, deadline_s) > number
            except LostObject:
                is_after = False  # it was below the floor
            low, high = (low, middle - 1) if is_after else (middle, high)
        return low

    def first_of(self, segment: int, deadline_s: float) -> int:
        """The number of the first record in a segment. Raises `LostObject`."""
        return first_number(
            self._objects.read_segment(Position(0, segment, 0), FRAME_HEAD_BYTES, deadline_s)
        )
