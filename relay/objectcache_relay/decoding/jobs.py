"""What a worker is asked, what it answers, and how a piece of a layer is cut into jobs. Pure.

Messages are msgpack, one a packet. No payload is in them: files are passed as descriptors, once,
and jobs name places in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from objectcache_relay.landing.landed_rows import LandedRow
from objectcache_schemas.limits import KIB, MIB

MESSAGE_BYTES_MAX = 4 * KIB
# A job costs some 30 us beside its bytes; a megabyte takes ten times as long. Less only where all
# workers would not have a part of a piece.
JOB_BYTES_MIN = 256 * KIB
JOB_BYTES_MAX = 2 * MIB
JOB_ROWS_MAX = 64  # of 46 bytes at most, so that a job fits a message


class MapFile(msgspec.Struct, frozen=True, tag="map", array_like=True):
    """Map a file, whose descriptor comes with the message."""

    file: int
    length_bytes: int
    is_target: bool  # written to, else read


class UnmapFile(msgspec.Struct, frozen=True, tag="unmap", array_like=True):
    """Unmap it: no job names it any more."""

    file: int


class JobRow(msgspec.Struct, frozen=True, array_like=True):
    """Slices of one layer that lie at one pitch in the source."""

    source_offset_bytes: int
    count: int
    pitch_bytes: int
    codec: int
    slice_bytes: int  # decoded

    @property
    def decoded_bytes(self) -> int:
        """Bytes that they are in the target."""
        return self.count * self.slice_bytes


class DecodeJob(msgspec.Struct, frozen=True, tag="decode", array_like=True):
    """Decode rows into the target, where all of their slices lie together: slices of `layer`
    dequantised, where `lossy` says how (`dtype_text`).
    """

    number: int
    source: int
    target: int
    target_offset_bytes: int
    rows: tuple[JobRow, ...]
    lossy: str = ""
    layer: int = 0

    @property
    def decoded_bytes(self) -> int:
        """Bytes that it writes."""
        return sum(row.decoded_bytes for row in self.rows)


class JobEnded(msgspec.Struct, frozen=True, tag="ended", array_like=True):
    """A job is done, and its worker touches no memory for it any more. An empty `error` is success;
    else `slice_index` is the first of its slices, of all rows, that could not be decoded, or,
    where `is_stored_so`, was decoded and cannot be dequantised. `took_s` is how long the worker was
    at it.
    """

    number: int
    error: str = ""
    slice_index: int = 0
    is_stored_so: bool = False
    took_s: float = 0.0


class FileChanged(msgspec.Struct, frozen=True, tag="changed", array_like=True):
    """A file is mapped, or is not mapped any more, as asked."""

    file: int


class WorkerReady(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The process takes jobs."""


WORKER_MESSAGES = msgspec.msgpack.Decoder(MapFile | UnmapFile | DecodeJob)
ANSWERS = msgspec.msgpack.Decoder(JobEnded | FileChanged | WorkerReady)


@dataclass(frozen=True, slots=True)
class MadeSlices:
    """Slices of one layer that are dequantised: how, from how many bytes, into how many."""

    lossy: str
    layer: int
    stored_bytes: int
    made_bytes: int

    def place_bytes(self, stored_offset_bytes: int) -> int:
        """Where what lies there in the payload begins in what is made of it."""
        return stored_offset_bytes // self.stored_bytes * self.made_bytes


@dataclass(frozen=True, slots=True)
class PiecePart:
    """What one job decodes, and where that lies in the piece of the payload."""

    rows: tuple[LandedRow, ...]
    piece_offset_bytes: int

    def job(
        self,
        number: int,
        source: int,
        target: int,
        piece_place_bytes: int,
        made: MadeSlices | None = None,
    ) -> DecodeJob:
        """As a worker is asked it, of a piece that begins there in the target."""
        rows = tuple(
            JobRow(row.offset_bytes, row.slice_count, row.pitch_bytes, row.codec, row.slice_bytes)
            for row in self.rows
        )
        offset_bytes = self.piece_offset_bytes
        if made is None:
            return DecodeJob(number, source, target, piece_place_bytes + offset_bytes, rows)
        place_bytes = piece_place_bytes + made.place_bytes(offset_bytes)
        return DecodeJob(number, source, target, place_bytes, rows, made.lossy, made.layer)

    def chunk(self, slice_index: int) -> int:
        """Which of the payload's chunks a slice of it is."""
        for row in self.rows:
            if slice_index < row.slice_count:
                return row.first_chunk + slice_index
            slice_index -= row.slice_count
        raise IndexError("the part has no such slice")


def slices_of(row: LandedRow, slice_bytes: int) -> LandedRow:
    """A run of bytes that is whole slices, as those."""
    if row.slice_bytes == slice_bytes:
        return row
    count = row.decoded_bytes // slice_bytes
    return row._replace(slice_count=count, pitch_bytes=slice_bytes, slice_bytes=slice_bytes)


def cut_rows(
    rows: Sequence[LandedRow], workers: int, *, whole_slices: bool = False
) -> Iterator[PiecePart]:
    """The jobs of a piece, in its order: so short that all workers have a part of it, and of
    `JOB_BYTES_MIN` to `JOB_BYTES_MAX` decoded bytes, but for what the piece's end, a slice or
    `JOB_ROWS_MAX` rows force. Rows that are shorter share a job. A slice is cut where it is not
    encoded, but for `whole_slices`.
    """
    piece_bytes = sum(row.decoded_bytes for row in rows)
    job_bytes = min(JOB_BYTES_MAX, max(JOB_BYTES_MIN, -(-piece_bytes // workers)))
    taken: list[LandedRow] = []
    taken_bytes = offset_bytes = 0
    for row in rows:
        rest: LandedRow | None = row
        while rest is not None:
            room_bytes = job_bytes - taken_bytes
            is_run = _is_run(rest) and not whole_slices
            unit_bytes = 1 if is_run else rest.slice_bytes
            if taken and (room_bytes < unit_bytes or len(taken) == JOB_ROWS_MAX):
                yield PiecePart(tuple(taken), offset_bytes)
                offset_bytes += taken_bytes
                taken, taken_bytes, room_bytes = [], 0, job_bytes
            head, rest = _divide(rest, room_bytes, is_run=is_run)
            taken.append(head)
            taken_bytes += head.decoded_bytes
    if taken:
        yield PiecePart(tuple(taken), offset_bytes)


def _is_run(row: LandedRow) -> bool:
    """Whether it may be cut anywhere."""
    return row.slice_count == 1 and row.codec == 0


def _divide(row: LandedRow, room_bytes: int, *, is_run: bool) -> tuple[LandedRow, LandedRow | None]:
    """What of a row there is room for, one slice at least, and the rest of it."""
    if row.decoded_bytes <= room_bytes:
        return row, None
    if is_run:
        left = row.slice_bytes - room_bytes
        head = row._replace(pitch_bytes=room_bytes, slice_bytes=room_bytes)
        offset_bytes = row.offset_bytes + room_bytes
        return head, row._replace(offset_bytes=offset_bytes, pitch_bytes=left, slice_bytes=left)
    count = max(1, room_bytes // row.slice_bytes)
    if count >= row.slice_count:
        return row, None
    rest = row._replace(
        first_chunk=row.first_chunk + count,
        slice_count=row.slice_count - count,
        offset_bytes=row.offset_bytes + count * row.pitch_bytes,
    )
    return row._replace(slice_count=count), rest
