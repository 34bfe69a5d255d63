"""The log in RADOS: one object that is appended to, and the segments that it has become.

`log` is the head. Its attribute `end` says which number is next and where its frame begins, and an
append is one operation on this one object: the attribute must be what the appender knows; write the
frame there; set the attribute. The head is never removed, so whoever comes with a number that has
been used fails, however long it slept and whatever was trimmed meanwhile.

When the head has `SEGMENT_BYTES` it becomes the segment `log.<index>`. Whoever is next to append
does it, and another goes on where one died:

1. make the segment, empty but as long as the head may be (there is room for it, or nothing changes)
2. seal the head: `end` says so, and no append fits it any more
3. fill the segment with what is in the head, and cut it there: all who do it write the same bytes
4. empty the head, and open it again

The head is as long as `OBJECT_BYTES_MAX` from the beginning, with holes for what is not there yet.
So an append into it makes nothing longer, and works on where the pool's quota is reached or an OSD
is full: what it is longer than `SEGMENT_BYTES` is the reserve for the records of deletions. Step 3
makes the segment shorter.

`kept` says which records may be read. A trim raises it, then removes segments below, and then
says from where on segments may be left. A server that slept through both can make a segment once
more that was trimmed: it is left over, and nobody reads it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from objectcache_schemas.errors import StorageFull, Unavailable
from objectcache_storage_server.engines.stores.rados.librados import (
    CANCELLED,
    EXISTS,
    OK,
    REFUSALS,
    RadosPool,
    WriteOperation,
    text,
)
from objectcache_storage_server.engines.stores.rados.log_frames import (
    CALL_BYTES,
    OBJECT_BYTES_MAX,
    RECORD_BYTES_MAX,
    SEGMENT_BYTES,
    LogEnd,
    LogKept,
    Position,
    make_frame,
)
from objectcache_storage_server.engines.stores.rados.log_objects import (
    END,
    HEAD,
    KEPT,
    LogObjects,
    change_attribute,
    log_must_be_there,
    segment_name,
)
from objectcache_storage_server.engines.stores.rados.log_reader import LogReader
from objectcache_storage_server.engines.stores.rados.operations import (
    Deadlines,
    WriteAnswer,
    remove_objects,
)
from objectcache_storage_server.engines.stores.shared_store import (
    LostObject,
    StoreTimeout,
    TrimmedLog,
)


class RadosLog:
    """Appending and trimming, and reading by `read`. Threads may do all of it at once."""

    def __init__(self, deadlines: Deadlines, pool: RadosPool) -> None:
        self._objects = LogObjects(deadlines, pool)
        self._reader = LogReader(self._objects)
        self.read = self._reader.read
        self._lock = threading.Lock()
        self._end: LogEnd | None = None  # as last seen: an append that trusts it wrongly fails

    def create(self, deadline_s: float) -> bool:
        """Make an empty log, unless there is one: whether it was made."""
        with WriteOperation(self._objects.pool.calls) as steps:
            steps.create()
            steps.truncate(OBJECT_BYTES_MAX)
            steps.set_attribute(END, LogEnd(0, 0, 0, 0).to_bytes())
            steps.set_attribute(KEPT, LogKept(0, 0).to_bytes())
            return self._objects.write(HEAD, steps, deadline_s, EXISTS) != EXISTS

    def end(self, deadline_s: float) -> int:
        """The number of the next record."""
        return self._look_end(deadline_s).number

    def _look_end(self, deadline_s: float) -> LogEnd:
        end = self._objects.look(deadline_s).end
        self._see(end)
        return end

    def _see(self, end: LogEnd | None) -> None:
        with self._lock:
            self._end = end

    # --- appending ---

    def append(self, number: int, record: bytes, deadline_s: float) -> bool:
        """See `SharedStore.append`."""
        assert len(record) <= RECORD_BYTES_MAX, len(record)
        call = os.urandom(CALL_BYTES)
        frame = make_frame(number, call, record)
        is_begun = False
        while True:
            end = self._place(number, len(frame), deadline_s, is_begun=is_begun)
            if end is None:
                return is_begun and self._is_ours(number, call, deadline_s)
            if self._append_at(end, frame, deadline_s):
                return True
            is_begun = True

    def _append_at(self, end: LogEnd, frame: bytes, deadline_s: float) -> bool:
        """Append where the log ends; False where that is not its end."""
        self._see(None)
        pool = self._objects.pool
        with WriteOperation(pool.calls) as steps:
            change_attribute(steps, END, end, end.after(frame))
            steps.write(frame, end.offset_bytes)
            answer = WriteAnswer(self._objects.deadlines, pool, HEAD, steps, deadline_s)
            code = answer.wait()
        if code == CANCELLED and not answer.is_given_up:
            return False
        if code != OK and code not in REFUSALS:
            raise StoreTimeout(f"record {end.number} of the log may have been stored: {text(code)}")
        with log_must_be_there(pool):
            pool.check(code, HEAD)
        self._see(end.after(frame))
        return True

    def _place(
        self, number: int, size_bytes: int, deadline_s: float, *, is_begun: bool
    ) -> LogEnd | None:
        """The end at which record `number` can be appended; None where the number is taken."""
        with self._lock:
            end = self._end
        try:
            if end is None or end.number != number or end.is_sealed:
                end = self._look_end(deadline_s)
            while end.number == number and (end.is_sealed or end.offset_bytes >= SEGMENT_BYTES):
                try:
                    end = self._make_segment(end, deadline_s)
                except StorageFull:
                    if end.is_sealed or end.offset_bytes + size_bytes > OBJECT_BYTES_MAX:
                        raise
                    break
        except (StorageFull, Unavailable) as error:
            if is_begun:
                raise StoreTimeout(
                    f"record {number} of the log may have been stored: {error}"
                ) from error
            if isinstance(error, StoreTimeout):
                raise Unavailable(f"record {number} of the log was not begun: {error}") from error
            raise
        if end.number < number:
            raise Unavailable(
                f"the log in pool {self._objects.pool.name} ends before record {end.number}, and "
                f"had record {number - 1}: it was set back"
            )
        return end if end.number == number else None

    def _is_ours(self, number: int, call: bytes, deadline_s: float) -> bool:
        """Whether record `number` is what this call appended: the library sends an operation again
        where an OSD failed, and then it may find its own trace.
        """
        try:
            frames, _ = self._reader.frames(number, 1, deadline_s)
        except (TrimmedLog, Unavailable) as error:
            raise StoreTimeout(f"record {number} of the log may have been stored") from error
        return frames[0].call == call

    # --- segments ---

    def _make_segment(self, end: LogEnd, deadline_s: float) -> LogEnd:
        """Make the head a segment; where the log ends after that, whoever did it.

        Raises `StorageFull` where there is no room, which leaves the head as it is.
        """
        name = segment_name(end.segment)
        sealed = replace(end, is_sealed=True)
        if not end.is_sealed:
            with WriteOperation(self._objects.pool.calls) as steps:
                steps.create()
                steps.truncate(OBJECT_BYTES_MAX)
                self._objects.write(name, steps, deadline_s, EXISTS)
            if not self._objects.swap(END, end, sealed, deadline_s):
                return self._look_end(deadline_s)
        whole = Position(end.first, end.segment, 0)
        view = self._objects.look(deadline_s, whole, OBJECT_BYTES_MAX)
        if view.end != sealed:
            return view.end
        with WriteOperation(self._objects.pool.calls) as steps:
            steps.write_full(view.data)
            self._objects.write(name, steps, deadline_s)
        emptied = sealed.after_segment()
        with WriteOperation(self._objects.pool.calls) as steps:
            change_attribute(steps, END, sealed, emptied)
            steps.truncate(0)
            steps.truncate(OBJECT_BYTES_MAX)
            self._objects.write(HEAD, steps, deadline_s, CANCELLED)
        return self._look_end(deadline_s)

    # --- trimming ---

    def trim(self, first: int, deadline_s: float) -> None:
        """See `SharedStore.trim_log`."""
        view = self._objects.look(deadline_s)
        kept, segment, floor = view.kept, view.end.segment, view.end.first
        if first < floor:
            segment = self._reader.segment_of(first, view, deadline_s)
            try:
                floor = self._reader.first_of(segment, deadline_s)
            except LostObject:
                return  # another trims
        if floor > kept.floor:
            raised = replace(kept, floor=floor)
            if not self._objects.swap(KEPT, kept, raised, deadline_s):
                return
            kept = raised
        if kept.segment < segment:
            names = (segment_name(index) for index in range(kept.segment, segment))
            remove_objects(self._objects.deadlines, self._objects.pool, names, deadline_s)
            self._objects.swap(KEPT, kept, replace(kept, segment=segment), deadline_s)
