"""Whose namespace it is: the store's mark in its first block, and what to make of one. Pure.

A namespace has no file system that would name its owner, and passed-through commands ask nobody. So
a store writes to a namespace only when it is blank, or carries the store's own id, which the index
folder repeats.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

from objectcache_schemas.limits import MIB

SUPERBLOCK_BYTES = 4096
HEADER_BYTES = 1 * MIB  # before the volume's first byte, so that rows stay aligned to flash pages
# Partition tables, volume managers, RAID and file systems put their marks within this much of
# either end of a device.
MARGIN_BYTES = 1 * MIB
STORE_ID_BYTES = 16
FORMAT_VERSION = 1

_MAGIC = b"ObjectCache NVMe"
_FIELDS = struct.Struct("<16sI16sQQ")
_SEAL = struct.Struct("<Q")


class RefusedNamespace(Exception):
    """The store must not write to this namespace; the message says why, and the remedy."""


class Claim(enum.Enum):
    """What a store may do with a namespace."""

    OPEN = "open"  # it is the store's
    FORMAT = "format"  # it is blank, and the store has none yet


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a store remembers on its namespace."""

    store_id: bytes
    segment_bytes: int
    capacity_bytes: int  # of the namespace, when it was formatted

    def to_bytes(self) -> bytes:
        """The first `SUPERBLOCK_BYTES` of the namespace."""
        fields = _FIELDS.pack(
            _MAGIC, FORMAT_VERSION, self.store_id, self.segment_bytes, self.capacity_bytes
        )
        return (fields + _SEAL.pack(xxhash.xxh3_64_intdigest(fields))).ljust(
            SUPERBLOCK_BYTES, b"\0"
        )

    @staticmethod
    def from_bytes(data: bytes) -> Superblock | None:
        """`None` where there is no superblock; raises `RefusedNamespace` for one that is damaged or
        of another version.
        """
        magic, version, store_id, segment_bytes, capacity_bytes = _FIELDS.unpack_from(data)
        if magic != _MAGIC:
            return None
        if version != FORMAT_VERSION:
            raise RefusedNamespace(f"it has format {version}, not {FORMAT_VERSION}")
        (seal,) = _SEAL.unpack_from(data, _FIELDS.size)
        if seal != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
            raise RefusedNamespace(f"its superblock is damaged; {_WIPE}")
        return Superblock(store_id, segment_bytes, capacity_bytes)


_WIPE = (
    "if nothing on it is needed, erase it (nvme format, or zero its first and last MiB) and remove "
    "the index folder"
)


def judge(
    found: Superblock | None,
    *,
    is_blank: bool,
    own_id: bytes | None,
    is_formatted: bool,
    capacity_bytes: int,
) -> Claim:
    """What a store of `own_id` (`None`: it has no namespace yet) may do with a namespace.

    `is_formatted`: the store has finished formatting one. `capacity_bytes` is the namespace's.
    Raises `RefusedNamespace`.
    """
    if found is None:
        return _judge_without_superblock(is_blank, is_formatted)
    if found.store_id != own_id:
        raise RefusedNamespace(f"it belongs to another store; name that store's folder, or {_WIPE}")
    if found.capacity_bytes > capacity_bytes:
        raise RefusedNamespace(
            f"it has {capacity_bytes} bytes, and had {found.capacity_bytes} when it was formatted"
        )
    return Claim.OPEN


def _judge_without_superblock(is_blank: bool, is_formatted: bool) -> Claim:
    if is_formatted:
        raise RefusedNamespace(
            "this store's namespace is another, or was erased; name the right device, or remove "
            "the index folder"
        )
    if not is_blank:
        raise RefusedNamespace(f"it holds something else; {_WIPE}")
    return Claim.FORMAT
