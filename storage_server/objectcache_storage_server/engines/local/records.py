"""What the local engine's index stores of an object or a bucket, and how rot in it is found.

A record lies behind a checksum that is seeded with what it belongs to, so that neither a changed
byte nor a record under another key goes unnoticed, though the record repeats neither.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import msgspec
import xxhash

from objectcache_schemas.records import BucketInfo, ObjectAttributes, ObjectInfo
from objectcache_storage_server.engines.catalog import BucketRow

SEAL_BYTES = 8  # of the checksum before a record
BUCKET_BYTES = 4  # of a bucket's number, big-endian, before a key

_NO_ATTRIBUTES = ObjectAttributes()
_digest = xxhash.xxh3_64_digest


class VersionName(NamedTuple):
    """Which version of which object."""

    bucket_number: int
    key: str
    serial: int


# Outside of the garbage collector's view, as is all that it holds: a get of a prefix makes many.
class Version(msgspec.Struct, frozen=True, gc=False):
    """One stored version of an object, and where it lies."""

    bucket_number: int
    info: ObjectInfo
    number: int  # row of the object table; used again once the object is gone
    serial: int  # of the commit that stored it; 0 until stored
    block_bytes: int
    checksums: array[int]  # xxh3_64 of each block
    extents: tuple[int, ...]  # in order; a chunk in a slot has one, an empty object none
    slot: int
    is_evictable: bool
    parent_hash: int  # `key_hash` of the chunk before it; 0 is unknown or none

    @property
    def name(self) -> VersionName:
        """Which version this is."""
        return VersionName(self.bucket_number, self.info.key, self.serial)


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A version without its bucket and key."""

    number: int
    serial: int
    block_bytes: int
    extents: tuple[int, ...]
    slot: int
    is_evictable: bool
    parent_hash: int
    size_bytes: int
    etag: str
    modified_s: float
    attributes: ObjectAttributes | None  # None where nothing is set, as of most chunks
    checksums: bytes


class _BucketRecord(msgspec.Struct, frozen=True, array_like=True):
    number: int
    info: BucketInfo


_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_bucket = msgspec.msgpack.Decoder(_BucketRecord).decode
_encode = msgspec.msgpack.Encoder().encode


def key_hash(bucket_number: int, key: str) -> int:
    """xxh3_64 of a bucket's number and a key; never 0, which stands for no key."""
    return raw_hash(bucket_number.to_bytes(BUCKET_BYTES, "big") + key.encode())


def raw_hash(raw: bytes) -> int:
    """`key_hash` of a bucket's number and a key's bytes, as they are stored."""
    return xxhash.xxh3_64_intdigest(raw) or 1


def seal(body: bytes, owner: int) -> bytes:
    """The body behind a checksum that holds only for this owner: a hash, or a number."""
    return _digest(body, owner) + body


def unseal(stored: bytes, owner: int) -> bytes | None:
    """The body; None where it is not what was sealed for this owner."""
    body = stored[SEAL_BYTES:]
    return body if _digest(body, owner) == stored[:SEAL_BYTES] else None


def seal_version(version: Version, serial: int, own_hash: int) -> bytes:
    """A version as it is stored by the commit `serial`."""
    info = version.info
    record = Record(
        version.number,
        serial,
        version.block_bytes,
        version.extents,
        version.slot,
        version.is_evictable,
        version.parent_hash,
        info.size_bytes,
        info.etag,
        info.modified_s,
        None if info.attributes == _NO_ATTRIBUTES else info.attributes,
        version.checksums.tobytes(),
    )
    return seal(_encode(record), own_hash)


def unseal_record(stored: bytes, own_hash: int) -> Record | None:
    """What is stored of the version with this key; None where it is damaged."""
    body = unseal(stored, own_hash)
    return None if body is None else _decode_record(body)


def info_of(record: Record, key: str) -> ObjectInfo:
    """What a record says of the object under `key`."""
    return ObjectInfo(
        key=key,
        size_bytes=record.size_bytes,
        etag=record.etag,
        modified_s=record.modified_s,
        attributes=record.attributes or _NO_ATTRIBUTES,
    )


def version_of(record: Record, bucket_number: int, key: str) -> Version:
    """The version that a record describes."""
    return Version(
        bucket_number,
        info_of(record, key),
        record.number,
        record.serial,
        record.block_bytes,
        array("Q", record.checksums),
        record.extents,
        record.slot,
        record.is_evictable,
        record.parent_hash,
    )


def seal_bucket(row: BucketRow) -> bytes:
    """A bucket as it is stored under its name."""
    return seal(_encode(_BucketRecord(row.number, row.info)), _name_hash(row.info.name.encode()))


def unseal_bucket(name: bytes, stored: bytes) -> BucketRow | None:
    """The bucket that is stored under `name`; None where it is damaged."""
    body = unseal(stored, _name_hash(name))
    if body is None:
        return None
    record = _decode_bucket(body)
    return BucketRow(record.number, record.info)


def _name_hash(name: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name)
