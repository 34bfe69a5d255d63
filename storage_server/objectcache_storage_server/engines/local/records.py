"""What the local engine's index stores of an object, sealed."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import msgspec

from objectcache_schemas.records import ObjectAttributes, ObjectInfo
from objectcache_storage_server.engines.lmdb_spaces.seals import seal, unseal

_NO_ATTRIBUTES = ObjectAttributes()


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
    # xxh3_64 of each frame up to its row's pitch, where it lies in an extent with encoded slices.
    frame_checksums: array[int] | None = None

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
    frame_checksums: bytes | None = None


_decode_record = msgspec.msgpack.Decoder(Record).decode
_encode = msgspec.msgpack.Encoder().encode


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
        None if version.frame_checksums is None else version.frame_checksums.tobytes(),
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
        None if record.frame_checksums is None else array("Q", record.frame_checksums),
    )
