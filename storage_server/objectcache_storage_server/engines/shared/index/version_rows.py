"""An object's version as the index stores it under its serial, and as a record carries it.

    seal        u64, of all that follows, for this serial
    head        see `HEAD`
    name        the bucket's number, u32 big-endian, and the key
    extents     those behind the first, u64 and u64 each
    etag, attributes (msgpack, or nothing), checksums (u64 each)

Little-endian, but for names. A row is made once, by the server that stores the version, and copied
from the record by all others.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from objectcache_schemas.records import ObjectAttributes, ObjectInfo
from objectcache_storage_server.engines.key_order import BUCKET_BYTES, key_bytes, key_text
from objectcache_storage_server.engines.lmdb_spaces.object_spaces import raw_space
from objectcache_storage_server.engines.lmdb_spaces.seals import SEAL_BYTES
from objectcache_storage_server.engines.shared.index.index_tables import IndexDamage
from objectcache_storage_server.engines.shared.versions import ExtentName, NewRow, SharedVersion

HEAD = np.dtype(
    [
        ("size_bytes", "<u8"),
        ("parent_hash", "<u8"),
        ("writer", "<u8"),  # of the first extent
        ("extent", "<u8"),
        ("modified_s", "<f8"),
        ("block_bytes", "<u4"),
        ("slot", "<u4"),
        ("attributes_bytes", "<u4"),
        ("extent_count", "<u4"),
        ("name_bytes", "<u2"),
        ("etag_bytes", "<u2"),
        ("flags", "u1"),
    ]
)
_HEAD = struct.Struct("<QQQQdIIIIHHB")
_EXTENT = struct.Struct("<QQ")
_NAME_AT = SEAL_BYTES + HEAD.itemsize
_FLAGS_AT = _NAME_AT - 1
EVICTABLE, PINNED = 1, 2  # flags

_NO_ATTRIBUTES = ObjectInfo(key="", size_bytes=0, etag="", modified_s=0).attributes
_NO_EXTENT = ExtentName(0, 0)
_digest = xxhash.xxh3_64_digest
_encode = msgspec.msgpack.Encoder().encode
_decode_attributes = msgspec.msgpack.Decoder(ObjectAttributes).decode

Heads = npt.NDArray[np.void]


def new_rows(versions: Iterable[SharedVersion]) -> list[NewRow]:
    """The rows of versions, less their seals."""
    rows: list[NewRow] = []
    for version in versions:
        name = raw_space(version.bucket_number) + key_bytes(version.info.key)
        rows.append(NewRow(name, version.extents, _pack_body(version, name)))
    return rows


def sealed_row(body: bytes, serial: int) -> bytes:
    """A row under its serial."""
    return _digest(body, serial) + body


def _pack_body(version: SharedVersion, raw_name: bytes) -> bytes:
    info = version.info
    etag = info.etag.encode()
    extents = version.extents
    attributes = b""
    if info.attributes is not _NO_ATTRIBUTES and info.attributes != _NO_ATTRIBUTES:
        attributes = _encode(info.attributes)
    first = extents[0] if extents else _NO_EXTENT
    head = _HEAD.pack(
        info.size_bytes,
        version.parent_hash,
        first[0],
        first[1],
        info.modified_s,
        version.block_bytes,
        version.slot,
        len(attributes),
        len(extents),
        len(raw_name),
        len(etag),
        EVICTABLE if version.is_evictable else 0,
    )
    more = b"" if len(extents) < 2 else b"".join([_EXTENT.pack(*each) for each in extents[1:]])
    return b"".join((head, raw_name, more, etag, attributes, version.checksums.tobytes()))


def unpack_version(stored: bytes, serial: int) -> SharedVersion:
    """The version of a row; raises `IndexDamage`."""
    check_row(stored, serial)
    (
        size_bytes,
        parent_hash,
        writer,
        extent,
        modified_s,
        block_bytes,
        slot,
        attributes_bytes,
        extent_count,
        name_bytes,
        etag_bytes,
        flags,
    ) = _HEAD.unpack_from(stored, SEAL_BYTES)
    at = _NAME_AT + name_bytes
    name = stored[_NAME_AT:at]
    extents: tuple[ExtentName, ...] = (ExtentName(writer, extent),) if extent_count else ()
    if extent_count > 1:
        end = at + (extent_count - 1) * _EXTENT.size
        extents += tuple(ExtentName(*each) for each in _EXTENT.iter_unpack(stored[at:end]))
        at = end
    etag = stored[at : at + etag_bytes].decode()
    at += etag_bytes
    attributes = _NO_ATTRIBUTES
    if attributes_bytes:
        attributes = _decode_attributes(stored[at : at + attributes_bytes])
    info = ObjectInfo(
        key=key_text(name[BUCKET_BYTES:]),
        size_bytes=size_bytes,
        etag=etag,
        modified_s=modified_s,
        attributes=attributes,
    )
    return SharedVersion(
        int.from_bytes(name[:BUCKET_BYTES], "big"),
        info,
        serial,
        block_bytes,
        array("Q", stored[at + attributes_bytes :]),
        extents,
        slot,
        bool(flags & EVICTABLE),
        parent_hash,
    )


def check_row(stored: bytes, serial: int) -> None:
    """Raise `IndexDamage` for a row that is not what was stored under this serial."""
    if _digest(stored[SEAL_BYTES:], serial) != stored[:SEAL_BYTES]:
        raise IndexDamage(f"the row of version {serial} does not match its checksum")


def heads_of(rows: list[bytes]) -> Heads:
    """The heads of rows, as a table."""
    return np.frombuffer(b"".join([row[SEAL_BYTES:_NAME_AT] for row in rows]), HEAD)


def names_of(rows: list[bytes], heads: Heads) -> list[bytes]:
    """Bucket numbers and keys, as bytes, of rows."""
    ends = (heads["name_bytes"].astype(np.int64) + _NAME_AT).tolist()
    return [row[_NAME_AT:end] for row, end in zip(rows, ends, strict=True)]


def name_of(stored: bytes) -> bytes:
    """A row's bucket number and key, as bytes."""
    name_bytes = int.from_bytes(stored[_FLAGS_AT - 4 : _FLAGS_AT - 2], "little")
    return stored[_NAME_AT : _NAME_AT + name_bytes]


def extents_of(stored: bytes) -> list[ExtentName]:
    """The extents that a row names."""
    fields = _HEAD.unpack_from(stored, SEAL_BYTES)
    writer, extent, count, name_bytes = fields[2], fields[3], fields[8], fields[9]
    if not count:
        return []
    at = _NAME_AT + name_bytes
    more = stored[at : at + (count - 1) * _EXTENT.size]
    return [ExtentName(writer, extent), *(ExtentName(*each) for each in _EXTENT.iter_unpack(more))]


def size_of(stored: bytes) -> int:
    """Bytes of the object."""
    return int.from_bytes(stored[SEAL_BYTES : SEAL_BYTES + 8], "little")


def is_pinned(stored: bytes) -> bool:
    """Whether an operator pinned the version."""
    return bool(stored[_FLAGS_AT] & PINNED)


def with_pin(stored: bytes, serial: int, pinned: bool) -> bytes:
    """The row of a version that an operator pinned, or not."""
    flags = stored[_FLAGS_AT] & ~PINNED | (PINNED if pinned else 0)
    return sealed_row(stored[SEAL_BYTES:_FLAGS_AT] + bytes([flags]) + stored[_NAME_AT:], serial)


def with_attributes(stored: bytes, serial: int, attributes: ObjectAttributes) -> bytes:
    """The row of a version with other attributes."""
    version = unpack_version(stored, serial)
    info = msgspec.structs.replace(version.info, attributes=attributes)
    body = _pack_body(msgspec.structs.replace(version, info=info), name_of(stored))
    return with_pin(sealed_row(body, serial), serial, is_pinned(stored))
