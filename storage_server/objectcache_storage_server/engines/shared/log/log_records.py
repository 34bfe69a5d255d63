"""A record of the log as bytes.

    magic           4 bytes
    format version  u16
    zeros           u16
    store           16 bytes, drawn at random by whoever made record 0
    number          u64
    writer          u64, whose record it is
    sequence        u64, how many records this writer had made before
    previous        u64, checksum of the record before it; 0 of record 0
    body            see `operations`
    checksum        u64, xxh3_64 of all before it, seeded with the number

Little-endian. A record that is not what it should be stops whoever reads it: what it said cannot be
made up.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from objectcache_schemas.errors import Unavailable

FORMAT_VERSION = 1
STORE_ID_BYTES = 16
_MAGIC = b"OCLR"
_HEAD = struct.Struct("<4sHH16sQQQQ")
_CHECKSUM = struct.Struct("<Q")
ENVELOPE_BYTES = _HEAD.size + _CHECKSUM.size


class UnreadableRecord(Unavailable):
    """A record that this server cannot follow, whatever it does."""


class DamagedRecord(UnreadableRecord):
    """A record that is not what was appended. A checkpoint behind it does without it."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record."""

    store_id: bytes
    number: int
    writer: int
    sequence: int
    previous: int
    body: bytes | memoryview


def pack_record(record: LogRecord) -> bytes:
    """The record as it is appended."""
    head = _HEAD.pack(
        _MAGIC,
        FORMAT_VERSION,
        0,
        record.store_id,
        record.number,
        record.writer,
        record.sequence,
        record.previous,
    )
    packed = head + record.body
    return packed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(packed, record.number))


def unpack_record(packed: bytes, number: int) -> LogRecord:
    """The record of this number; raises `DamagedRecord`, `UnreadableRecord`."""
    where = f"record {number} of the store's log"
    if len(packed) < ENVELOPE_BYTES or packed[:4] != _MAGIC:
        raise DamagedRecord(
            number,
            f"{where} is none of ObjectCache's: something else was written to the store, or it is "
            f"damaged; {_REMEDY}",
        )
    _, version, _, store_id, own_number, writer, sequence, previous = _HEAD.unpack_from(packed)
    if version > FORMAT_VERSION:
        raise UnreadableRecord(
            f"{where} has format {version}, and this server reads {FORMAT_VERSION}: a newer server "
            f"writes to the store; update this one"
        )
    with memoryview(packed) as whole:
        checksum = xxhash.xxh3_64_intdigest(whole[: -_CHECKSUM.size], number)
    if checksum != record_checksum(packed) or own_number != number:
        raise DamagedRecord(number, f"{where} does not match its checksum; {_REMEDY}")
    body = memoryview(packed)[_HEAD.size : -_CHECKSUM.size]
    return LogRecord(store_id, own_number, writer, sequence, previous, body)


def record_checksum(packed: bytes) -> int:
    """The checksum that a record ends with."""
    checksum: int = _CHECKSUM.unpack(packed[-_CHECKSUM.size :])[0]
    return checksum


_REMEDY = (
    "take a checkpoint at a server that is beyond it (objectcache admin checkpoint), which this "
    "one then loads, or restore it from a replica or a backup of the store"
)
