"""Extents as the index stores them.

    seal            u64, for the key's hash
    head            shape, versions that name it, number of the record that says when it was read
    serials         first and last of the versions of each record that added some: u64 and u64

An extent in the graveyard has its shape and the number of the record that emptied it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from objectcache_storage_server.engines.key_order import raw_hash
from objectcache_storage_server.engines.lmdb_spaces.seals import seal
from objectcache_storage_server.engines.shared.index.index_tables import opened_row
from objectcache_storage_server.engines.shared.versions import ExtentName, ExtentShape

_NAME = struct.Struct(">QQ")
_HEAD = struct.Struct("<IIQQIQ")
_SERIALS = struct.Struct("<QQ")
_GRAVE = struct.Struct("<IIQQQ")
EXTENT_NAME_BYTES = _NAME.size


@dataclass(frozen=True, slots=True)
class ExtentRow:
    """An extent that some version names."""

    shape: ExtentShape
    live_count: int  # versions that name it
    last_used: int  # number of the record that stored it or named it as read, whichever is later
    serials: tuple[tuple[int, int], ...]  # first and last, of its versions and perhaps others

    def pack(self, raw: bytes) -> bytes:
        """The row for its key."""
        shape = self.shape
        head = _HEAD.pack(
            shape.slots,
            shape.num_layers,
            shape.slice_bytes,
            shape.object_bytes,
            self.live_count,
            self.last_used,
        )
        serials = b"".join([_SERIALS.pack(*each) for each in self.serials])
        return seal(head + serials, raw_hash(raw))

    @classmethod
    def unpack(cls, raw: bytes, stored: bytes) -> ExtentRow:
        """The row of a key; raises `IndexDamage`."""
        body = opened_row(stored, raw_hash(raw), "an extent's row")
        *shape, live_count, last_used = _HEAD.unpack_from(body)
        serials = tuple((first, last) for first, last in _SERIALS.iter_unpack(body[_HEAD.size :]))
        return cls(ExtentShape(*shape), live_count, last_used, serials)


@dataclass(frozen=True, slots=True)
class BuriedExtent:
    """An extent that no version names any more."""

    name: ExtentName
    shape: ExtentShape
    emptied_by: int  # number of the record

    def pack(self) -> bytes:
        """The row for its key."""
        shape = self.shape
        body = _GRAVE.pack(
            shape.slots, shape.num_layers, shape.slice_bytes, shape.object_bytes, self.emptied_by
        )
        return seal(body, raw_hash(raw_extent(self.name)))

    @classmethod
    def unpack(cls, raw: bytes, stored: bytes) -> BuriedExtent:
        """The row of a key; raises `IndexDamage`."""
        *shape, emptied_by = _GRAVE.unpack(opened_row(stored, raw_hash(raw), "a buried extent"))
        return cls(extent_name(raw), ExtentShape(*shape), emptied_by)


def raw_extent(name: ExtentName) -> bytes:
    """An extent's name as a key."""
    return _NAME.pack(*name)


def extent_name(raw: bytes) -> ExtentName:
    """What `raw_extent` was made of."""
    return ExtentName(*_NAME.unpack(raw))


def joined_names(raw_names: bytes) -> list[bytes]:
    """The keys of extents that stand one after the other."""
    size = EXTENT_NAME_BYTES
    return [raw_names[begin : begin + size] for begin in range(0, len(raw_names), size)]
