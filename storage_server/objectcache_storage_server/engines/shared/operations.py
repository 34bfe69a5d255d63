"""What a record says: operations on the index, applied in their order by every server alike.

Whatever an operation depends on is in it, or in the index that the records before it made. So every
server makes the same index of the same records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from objectcache_schemas.records import BucketInfo, ObjectAttributes


class _Operation(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """In arrays, each with its tag first. A field that is added goes last and has a default; a
    change that older servers must not pass over raises `log_records.FORMAT_VERSION`.
    """


class PutBucket(_Operation, frozen=True, tag=1):
    """A bucket is new, or its info is changed; its name never is."""

    number: int
    info: BucketInfo


class RemoveBucket(_Operation, frozen=True, tag=2):
    """A bucket, which holds no objects, is removed."""

    number: int
    name: str


class AddVersions(_Operation, frozen=True, tag=3):
    """Versions with serials from `first_serial` on, in place of what is stored under their keys."""

    bucket_number: int
    first_serial: int
    rows: list[bytes]  # see `version_rows`
    shapes: list[tuple[int, int, int, int, int, int]]  # writer, number, shape of new extents


class DeleteVersions(_Operation, frozen=True, tag=4):
    """Versions are deleted, each of which is there."""

    serials: list[int]


class ChangeAttributes(_Operation, frozen=True, tag=5):
    """A version has other attributes."""

    serial: int
    attributes: ObjectAttributes


class SetPinned(_Operation, frozen=True, tag=6):
    """Versions, each of which is there, are pinned by an operator, or are not any more."""

    serials: list[int]
    is_pinned: bool


class PutDocument(_Operation, frozen=True, tag=7):
    """A document that all servers share is stored, or removed."""

    name: str
    document: bytes | None


class Heartbeat(_Operation, frozen=True, tag=8):
    """The record's writer lives: what others are to know of it, and extents that it read."""

    document: bytes | None  # None: as before
    used: bytes  # names of extents, as `extent_rows.raw_extent`, one after the other


class FenceWriter(_Operation, frozen=True, tag=9):
    """A writer was taken for dead; what it has written and not named is a leftover."""

    writer: int


class ForgetWriter(_Operation, frozen=True, tag=10):
    """A fenced writer, whose leftovers are deleted."""

    writer: int


class TakeUpkeep(_Operation, frozen=True, tag=11):
    """The record's writer holds the upkeep lease from now on."""


class Bury(_Operation, frozen=True, tag=12):
    """Extents of the graveyard, whose objects are deleted."""

    extents: bytes  # names, as in `Heartbeat`


class NameCheckpoint(_Operation, frozen=True, tag=13):
    """There is a whole checkpoint, of the index before record `number`."""

    number: int


class AskForTurn(_Operation, frozen=True, tag=14):
    """The record's writer lost several races: the others wait a moment for its next record."""

    wanted_ms: int  # that the writer takes for a record; a hint, which others bound


Operation: TypeAlias = (
    PutBucket
    | RemoveBucket
    | AddVersions
    | DeleteVersions
    | ChangeAttributes
    | SetPinned
    | PutDocument
    | Heartbeat
    | FenceWriter
    | ForgetWriter
    | TakeUpkeep
    | Bury
    | NameCheckpoint
    | AskForTurn
)

encode_operation = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Operation]).decode


def join_operations(encoded: Sequence[bytes]) -> bytes:
    """A record's body, of operations that are encoded each."""
    return msgspec.msgpack.encode([msgspec.Raw(one) for one in encoded])


def split_operations(body: bytes | memoryview) -> list[Operation]:
    """The operations of a body; raises `msgspec.MsgspecError`."""
    return _decode(body)
