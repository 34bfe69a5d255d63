"""What cannot be true of where objects and extents lie. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from objectcache_storage_server.engines.block_checksums import block_count
from objectcache_storage_server.engines.local.records import Version
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES

Extents = npt.NDArray[np.void]  # rows of EXTENT_COLUMNS
Numbers = npt.NDArray[np.int64]  # of extents


def place_fault(version: Version, extents: Extents) -> str | None:
    """Why an object cannot lie where its record says; None where it can."""
    for number in version.extents:
        if number >= len(extents) or not extents["is_used"][number]:
            return f"it lies in extent {number}, which does not exist"
    size_bytes = version.info.size_bytes
    if len(version.checksums) != block_count(size_bytes, version.block_bytes):
        return f"{len(version.checksums)} checksums do not cover its {size_bytes} bytes"
    if not version.extents:
        return "it has bytes and no extent" if size_bytes else None
    rows = extents[list(version.extents)]
    if rows["slots"].max() == 1 and not rows["is_encoded"].any():
        return _run_fault(version, rows["length_bytes"].tolist())
    return _slot_fault(version, rows)


def _run_fault(version: Version, lengths_bytes: Sequence[int]) -> str | None:
    """Every run but the last holds whole checksum blocks."""
    if version.slot:
        return f"it lies in slot {version.slot} of an extent without slots"
    room_bytes = lengths_bytes[-1] + sum(
        length_bytes - length_bytes % version.block_bytes for length_bytes in lengths_bytes[:-1]
    )
    if version.info.size_bytes > room_bytes:
        return f"its {version.info.size_bytes} bytes do not fit {room_bytes} bytes of extents"
    return None


def _slot_fault(version: Version, rows: Extents) -> str | None:
    row = rows[0]
    if len(rows) > 1:
        return "it lies in several extents with slots"
    if version.slot >= row["slots"]:
        return f"it lies in slot {version.slot} of an extent of {row['slots']}"
    chunk_bytes = int(row["num_layers"]) * int(row["slice_bytes"])
    if version.info.size_bytes != chunk_bytes:
        return f"its {version.info.size_bytes} bytes lie in a slot of {chunk_bytes}"
    frames = -1 if version.frame_checksums is None else len(version.frame_checksums)
    if row["is_encoded"] and frames != row["num_layers"]:
        return f"it has checksums of {max(frames, 0)} frames, and {row['num_layers']} frames"
    return None


class Claims:
    """Which objects name which extents and slots, in 6 bytes an object."""

    def __init__(self) -> None:
        self._extents = array("I")
        self._slots = array("H")

    def add(self, version: Version) -> None:
        """Take down what this version names."""
        self._extents.extend(version.extents)
        self._slots.extend([version.slot] * len(version.extents))

    def per_extent(self, extent_count: int) -> npt.NDArray[np.int64]:
        """How many claims there are on each extent."""
        return np.bincount(self._named(), minlength=extent_count)[:extent_count]

    def shared(self) -> list[tuple[int, int]]:
        """(extent, slot) that more than one object claims."""
        joined = self._named() << 16 | np.frombuffer(self._slots, np.uint16)
        places, counts = np.unique(joined, return_counts=True)
        return [divmod(place, 1 << 16) for place in places[counts > 1].tolist()]

    def _named(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._extents, np.uint32).astype(np.int64)


def unnamed_extents(extents: Extents, claims: Claims) -> Numbers:
    """Extents that no object lies in."""
    return np.flatnonzero(extents["is_used"] & (claims.per_extent(len(extents)) == 0))


def outside_extents(extents: Extents, segments: Sequence[int], segment_bytes: int) -> Numbers:
    """Extents that do not lie within one segment that exists."""
    used = np.flatnonzero(extents["is_used"])
    begins = extents["offset_bytes"][used].astype(np.int64)
    lengths = extents["length_bytes"][used].astype(np.int64)
    numbers, skips = np.divmod(begins, segment_bytes)
    fits = np.isin(numbers, np.array(segments, np.int64)) & (skips + lengths <= segment_bytes)
    fits &= (lengths > 0) & (begins % BLOCK_BYTES == 0)
    outside: Numbers = used[~fits]
    return outside


def overlapping_extents(extents: Extents) -> Numbers:
    """Extents that begin within one that begins before them, or with them."""
    used = np.flatnonzero(extents["is_used"])
    used = used[np.argsort(extents["offset_bytes"][used], kind="stable")]
    begins = extents["offset_bytes"][used].astype(np.int64)
    ends = begins + extents["length_bytes"][used].astype(np.int64)
    overlaps = np.zeros(len(used), np.bool_)
    overlaps[1:] = begins[1:] < np.maximum.accumulate(ends)[:-1]
    found: Numbers = used[overlaps]
    return found
