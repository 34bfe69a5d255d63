"""What the shared engine's index says of an object, and where its bytes lie.

An extent is bytes that were written by one put and go together. That of a prefix holds the slices
of its chunks layer by layer: slice l of slot s is at (l * slots + s) * slice_bytes. Any other
object is an extent of one slot and one layer. An extent is cut into objects of the store, of
`object_bytes` each but the last: whole layers where several fit, whole slices otherwise.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import msgspec

from objectcache_schemas.records import ObjectInfo


class ExtentName(NamedTuple):
    """Which extent: `writer` is drawn at random by each start of a server, `number` is its own."""

    writer: int  # 63 bits
    number: int

    def object_name(self, piece: int) -> str:
        """The store's name of one of the objects that it is cut into."""
        return f"{writer_prefix(self.writer)}{self.number:x}.{piece:x}"


class ExtentShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How an extent's bytes are laid out and cut."""

    slots: int
    num_layers: int
    slice_bytes: int
    object_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole extent."""
        return self.slots * self.num_layers * self.slice_bytes

    @property
    def object_count(self) -> int:
        """Objects that it is cut into."""
        return -(-self.size_bytes // self.object_bytes)


class SharedVersionName(NamedTuple):
    """Which version of which object."""

    bucket_number: int
    key: str
    serial: int


class NewRow(NamedTuple):
    """A version that is to be stored, as `index.version_rows` makes its row, less the seal."""

    name: bytes  # the bucket's number and the key
    extents: tuple[ExtentName, ...]
    body: bytes


class SharedVersion(msgspec.Struct, frozen=True, gc=False):
    """One stored version of an object, and where it lies."""

    bucket_number: int
    info: ObjectInfo
    serial: int  # number of the record that stored it, with its place in it; 0 until stored
    block_bytes: int
    checksums: array[int]  # xxh3_64 of each block
    extents: tuple[ExtentName, ...]  # in order; a chunk in a slot has one, an empty object none
    slot: int
    is_evictable: bool
    parent_hash: int  # `key_hash` of the chunk before it; 0 is unknown or none

    @property
    def name(self) -> SharedVersionName:
        """Which version this is."""
        return SharedVersionName(self.bucket_number, self.info.key, self.serial)


def writer_prefix(writer: int) -> str:
    """What the names of all objects of one writer begin with."""
    return f"data/{writer:016x}/"
