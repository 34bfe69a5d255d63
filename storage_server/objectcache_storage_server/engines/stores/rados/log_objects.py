"""The objects of the log: its head, and its segments; see `rados_log.py`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from objectcache_schemas.errors import Unavailable
from objectcache_storage_server.engines.stores.rados.librados import (
    CANCELLED,
    OK,
    RadosPool,
    WriteOperation,
)
from objectcache_storage_server.engines.stores.rados.log_frames import (
    LogEnd,
    LogKept,
    Position,
)
from objectcache_storage_server.engines.stores.rados.operations import (
    Deadlines,
    Range,
    ReadAnswer,
    WriteAnswer,
)
from objectcache_storage_server.engines.stores.shared_store import LostObject

HEAD = "log"
END, KEPT = b"end", b"kept"  # attributes of the head


def segment_name(segment: int) -> str:
    """The object of a segment."""
    return f"{HEAD}.{segment:010d}"


class HeadView(NamedTuple):
    """The head at one moment."""

    end: LogEnd
    kept: LogKept
    data: memoryview  # of what was asked for, as far as the log goes


class LogObjects:
    """Reads and writes of the head and of segments."""

    def __init__(self, deadlines: Deadlines, pool: RadosPool) -> None:
        self.deadlines, self.pool = deadlines, pool

    def look(self, deadline_s: float, at: Position | None = None, size_bytes: int = 0) -> HeadView:
        """The head as it is, with so much of what follows a position in it."""
        ranges = []
        if at is not None:
            ranges = [Range.into(memoryview(bytearray(size_bytes)), at.offset_bytes)]
        answer = ReadAnswer(
            self.deadlines, self.pool, HEAD, ranges, deadline_s, with_attributes=True
        )
        with log_must_be_there(self.pool):
            answer.end()
        end = LogEnd.from_bytes(answer.attributes.get(END))
        kept = LogKept.from_bytes(answer.attributes.get(KEPT))
        if at is None or at.segment != end.segment:
            return HeadView(end, kept, memoryview(b""))
        return HeadView(end, kept, ranges[0].landing[: max(0, end.offset_bytes - at.offset_bytes)])

    def read(self, at: Position, end: LogEnd, size_bytes: int, deadline_s: float) -> memoryview:
        """What follows a position in a segment or in the head; less where that ends. `end` is of a
        view that is not older than the position. Raises `LostObject` for a segment.
        """
        if at.segment >= end.segment:
            view = self.look(deadline_s, at, size_bytes)
            if view.end.segment == at.segment:
                return view.data
        return self.read_segment(at, size_bytes, deadline_s)

    def read_segment(self, at: Position, size_bytes: int, deadline_s: float) -> memoryview:
        """What follows a position in a segment. Raises `LostObject`."""
        landing = memoryview(bytearray(size_bytes))
        ranges = [Range.into(landing, at.offset_bytes)]
        name = segment_name(at.segment)
        [found_bytes] = ReadAnswer(self.deadlines, self.pool, name, ranges, deadline_s).end()
        return landing[:found_bytes]

    def write(self, name: str, steps: WriteOperation, deadline_s: float, *expected: int) -> int:
        """Carry out a write; the answer, where it is well or among those expected."""
        answer = WriteAnswer(self.deadlines, self.pool, name, steps, deadline_s)
        with log_must_be_there(self.pool):
            return answer.end(*expected)

    def swap(
        self, attribute: bytes, old: LogEnd | LogKept, new: LogEnd | LogKept, deadline_s: float
    ) -> bool:
        """Change an attribute of the head, if it is what is said."""
        with WriteOperation(self.pool.calls) as steps:
            change_attribute(steps, attribute, old, new)
            return self.write(HEAD, steps, deadline_s, CANCELLED) == OK


def change_attribute(
    steps: WriteOperation, attribute: bytes, old: LogEnd | LogKept, new: LogEnd | LogKept
) -> None:
    """Have a write change an attribute of the head, or do nothing if it is not what is said."""
    steps.assert_exists()
    steps.compare_attribute(attribute, old.to_bytes())
    steps.set_attribute(attribute, new.to_bytes())


@contextmanager
def log_must_be_there(pool: RadosPool) -> Generator[None, None, None]:
    """A head that is not there is not a lost object: the log cannot be asked."""
    try:
        yield
    except LostObject as error:
        raise Unavailable(f"the log in pool {pool.name} is gone: {error}") from error
