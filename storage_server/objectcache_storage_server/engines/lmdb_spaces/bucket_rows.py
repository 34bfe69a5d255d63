"""Buckets as an index stores them, sealed under their names."""

from __future__ import annotations

import msgspec
import xxhash

from objectcache_schemas.records import BucketInfo
from objectcache_storage_server.engines.catalog import BucketRow
from objectcache_storage_server.engines.lmdb_spaces.seals import seal, unseal


class _BucketRecord(msgspec.Struct, frozen=True, array_like=True):
    number: int
    info: BucketInfo


_decode = msgspec.msgpack.Decoder(_BucketRecord).decode
_encode = msgspec.msgpack.Encoder().encode


def seal_bucket(row: BucketRow) -> bytes:
    """A bucket as it is stored under its name."""
    return seal(_encode(_BucketRecord(row.number, row.info)), _name_hash(row.info.name.encode()))


def unseal_bucket(name: bytes, stored: bytes) -> BucketRow | None:
    """The bucket that is stored under `name`; None where it is damaged."""
    body = unseal(stored, _name_hash(name))
    if body is None:
        return None
    record = _decode(body)
    return BucketRow(record.number, record.info)


def _name_hash(name: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name)
