"""The bytes of the log: records in frames, and the attributes that say where it stands.

A frame is a head of 40 bytes, little-endian, and the record:

    magic    4 bytes   `FRAME_MAGIC`
    size     uint32    bytes of the record
    number   uint64    of the record
    call     16 bytes  drawn by the call that appended it, so that it knows its own frame again
    sum      uint64    xxh3_64 of what stands before it in the head, and of the record
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from typing import NamedTuple

import xxhash

from objectcache_schemas.errors import DamagedData
from objectcache_schemas.limits import MIB

RECORD_BYTES_MAX = 4 * MIB
SEGMENT_BYTES = 4 * MIB  # of the head, or a little more, when it becomes a segment
FRAME_MAGIC = b"OCr1"
_HEAD = struct.Struct("<4sIQ16s")
_SUM = struct.Struct("<Q")
FRAME_HEAD_BYTES = _HEAD.size + _SUM.size
CALL_BYTES = 16
# Of the head: what is above `SEGMENT_BYTES` is for records that are appended where no segment can
# be made for want of space.
OBJECT_BYTES_MAX = SEGMENT_BYTES + 4 * MIB + RECORD_BYTES_MAX + FRAME_HEAD_BYTES


class Frame(NamedTuple):
    """A record of the log as it was read."""

    number: int
    call: bytes
    record: bytes

    @property
    def size_bytes(self) -> int:
        """Of the whole frame."""
        return FRAME_HEAD_BYTES + len(self.record)


def make_frame(number: int, call: bytes, record: bytes) -> bytes:
    """The bytes of a record in the log."""
    head = _HEAD.pack(FRAME_MAGIC, len(record), number, call)
    return head + _SUM.pack(_sum(head, record)) + record


def frame_bytes(head: memoryview | bytes, number: int) -> int:
    """How long the frame is that begins so. Raises `DamagedData` where none of this number does."""
    if len(head) < FRAME_HEAD_BYTES:
        raise DamagedData(f"the log's record {number} is cut off")
    magic, size_bytes, found, _ = _HEAD.unpack_from(head)
    if magic != FRAME_MAGIC or found != number:
        raise DamagedData(f"the log's record {number} is not where it must be: bytes of another")
    return FRAME_HEAD_BYTES + int(size_bytes)


def first_number(head: memoryview | bytes) -> int:
    """The number of the frame that begins so. Raises `DamagedData` where none does."""
    if len(head) < FRAME_HEAD_BYTES or bytes(head[: len(FRAME_MAGIC)]) != FRAME_MAGIC:
        raise DamagedData("a segment of the log does not begin with a record")
    return int(_HEAD.unpack_from(head)[2])


def parse_frames(data: memoryview, number: int) -> list[Frame]:
    """The whole frames at the beginning of `data`, the first of which has this number.

    Raises `DamagedData` where one is not what was appended.
    """
    frames: list[Frame] = []
    offset_bytes = 0
    while len(data) - offset_bytes >= FRAME_HEAD_BYTES:
        head = bytes(data[offset_bytes : offset_bytes + FRAME_HEAD_BYTES])
        end_bytes = offset_bytes + frame_bytes(head, number)
        if end_bytes > len(data):
            break
        record = bytes(data[offset_bytes + FRAME_HEAD_BYTES : end_bytes])
        if _SUM.unpack_from(head, _HEAD.size)[0] != _sum(head[: _HEAD.size], record):
            raise DamagedData(f"the log's record {number} is damaged: its checksum does not match")
        frames.append(Frame(number, _HEAD.unpack_from(head)[3], record))
        offset_bytes, number = end_bytes, number + 1
    return frames


def _sum(head: bytes, record: bytes) -> int:
    hash_of = xxhash.xxh3_64(head)
    hash_of.update(record)
    return hash_of.intdigest()


class Position(NamedTuple):
    """Where the record `number` begins, or will."""

    number: int
    segment: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class LogEnd:
    """Where the log ends: an attribute of its head, which an append compares and changes."""

    number: int  # of the next record
    offset_bytes: int  # of the next frame in the head
    segment: int  # that the head will be
    first: int  # number of the first record in the head
    is_sealed: bool = False  # nothing is appended until the head has been made a segment

    def after(self, frame: bytes) -> LogEnd:
        """The end when this frame has been appended."""
        return replace(self, number=self.number + 1, offset_bytes=self.offset_bytes + len(frame))

    def after_segment(self) -> LogEnd:
        """The end when the head has been made a segment, and is empty again."""
        return LogEnd(self.number, 0, self.segment + 1, self.number)

    def to_bytes(self) -> bytes:
        """The attribute's value."""
        words = (self.number, self.offset_bytes, self.segment, self.first, int(self.is_sealed))
        return b" ".join(b"%d" % word for word in words)

    @staticmethod
    def from_bytes(value: bytes | None) -> LogEnd:
        number, offset_bytes, segment, first, is_sealed = parse_numbers(value, 5)
        return LogEnd(number, offset_bytes, segment, first, bool(is_sealed))


@dataclass(frozen=True, slots=True)
class LogKept:
    """What of the log is kept: an attribute of its head, which a trim changes."""

    floor: int  # number of the first record that may be read
    segment: int  # the first that may be there

    def to_bytes(self) -> bytes:
        """The attribute's value."""
        return b"%d %d" % (self.floor, self.segment)

    @staticmethod
    def from_bytes(value: bytes | None) -> LogKept:
        return LogKept(*parse_numbers(value, 2))


def parse_numbers(value: bytes | None, count: int) -> list[int]:
    """Numbers of an attribute. Raises `DamagedData`."""
    if value is None or re.fullmatch(rb"\d{1,20}( \d{1,20})*", value) is None:
        raise DamagedData(f"the log's head says {value!r} of where it stands")
    numbers = [int(word) for word in value.split()]
    if len(numbers) != count:
        raise DamagedData(f"the log's head says {value!r} of where it stands")
    return numbers
