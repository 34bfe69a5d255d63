"""What the files engine's index stores in a row, and how rot in a row is found.

A record lies behind its own checksum and names the row it belongs to, so that neither a changed
byte nor a record under another key goes unnoticed.
"""

from __future__ import annotations

import sqlite3
from array import array
from typing import Any

import msgspec
import xxhash

from objectcache_schemas.records import BucketInfo, ObjectInfo
from objectcache_storage_server.engines.blobs.blob_catalog import BlobVersion
from objectcache_storage_server.engines.block_checksums import block_checksum
from objectcache_storage_server.engines.key_order import key_bytes

SEAL_BYTES = 8  # of the checksum before a record

_bucket_decoder = msgspec.msgpack.Decoder(BucketInfo)


class RowRecord(msgspec.Struct, frozen=True, array_like=True):
    """What the index says of a version, stored behind its own checksum."""

    bucket_number: int
    object_id: int
    block_bytes: int
    checksums_checksum: int  # of the row's `checksums`
    info: ObjectInfo

    def to_bytes(self) -> bytes:
        """The record as it is stored."""
        return _sealed(msgspec.msgpack.encode(self))

    @staticmethod
    def from_row(
        bucket_number: int, key: bytes, object_id: int, size_bytes: int, stored: object
    ) -> RowRecord | None:
        """The record of a row; None where it, or a column beside it, is not what was stored."""
        body = _unsealed(stored)
        if body is None:
            return None
        record = _record_decoder.decode(body)
        info = record.info
        row = (bucket_number, key, object_id, size_bytes)
        is_whole = row == (
            record.bucket_number,
            info.key.encode(),
            record.object_id,
            info.size_bytes,
        )
        return record if is_whole else None


_record_decoder = msgspec.msgpack.Decoder(RowRecord)


def version_of_row(
    bucket_number: int,
    key: bytes,
    object_id: int,
    size_bytes: int,
    stored: object,
    checksums: object,
) -> BlobVersion | None:
    """The version that a row describes; None where the row is damaged."""
    record = RowRecord.from_row(bucket_number, key, object_id, size_bytes, stored)
    if record is None or not isinstance(checksums, bytes):
        return None
    if block_checksum(checksums) != record.checksums_checksum:
        return None
    return BlobVersion(
        bucket_number, record.object_id, record.info, record.block_bytes, array("Q", checksums)
    )


def row_of_version(version: BlobVersion) -> tuple[Any, ...]:
    """The columns of a version's row."""
    checksums = version.checksums.tobytes()
    record = RowRecord(
        version.bucket_number,
        version.blob_number,
        version.block_bytes,
        block_checksum(checksums),
        version.info,
    )
    return (
        version.bucket_number,
        key_bytes(version.info.key),
        version.blob_number,
        version.info.size_bytes,
        record.to_bytes(),
        checksums,
    )


def _sealed(body: bytes) -> bytes:
    """A checksum of the body, then the body."""
    return xxhash.xxh3_64_digest(body) + body


def _unsealed(stored: object) -> bytes | None:
    """The body; None where it is not what was sealed."""
    if not isinstance(stored, bytes):
        return None
    body = stored[SEAL_BYTES:]
    return body if xxhash.xxh3_64_digest(body) == stored[:SEAL_BYTES] else None


def seal_bucket(info: BucketInfo) -> bytes:
    """A bucket's info as it is stored."""
    return _sealed(msgspec.msgpack.encode(info))


def unseal_bucket(stored: object) -> BucketInfo:
    """A bucket's info; raises `sqlite3.DatabaseError` where it is not what was stored."""
    body = _unsealed(stored)
    if body is None:
        raise sqlite3.DatabaseError("a bucket's row does not match its checksum")
    return _bucket_decoder.decode(body)
