"""Extents as arithmetic: how many slots, how long, and where a slice lies. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from objectcache_encodings.frames import PITCH_MULTIPLE_BYTES, frame_bytes_max
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES

SLOTS_MAX = 256  # of one extent; more would only make the rows of short prefixes thinner
SINGLE_SLICE_BYTES_MIN = 4 * BLOCK_BYTES  # frames of which, two thirds as long, are a block less


def round_up(length_bytes: int, unit_bytes: int = BLOCK_BYTES) -> int:
    """The next multiple of `unit_bytes`."""
    return -(-length_bytes // unit_bytes) * unit_bytes


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of an extent: `slots` chunks of `num_layers` slices of `slice_bytes`.

    One slot is a plain run, whatever its layers. More are layer-major across the slots: slice l of
    slot j is at `l * row_stride_bytes + j * slice_bytes` from the extent's begin.
    """

    slots: int
    num_layers: int
    slice_bytes: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk."""
        return self.num_layers * self.slice_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one layer of all slots."""
        return self.slots * self.slice_bytes

    @property
    def row_stride_bytes(self) -> int:
        """From one layer to the next."""
        return self.slice_bytes if self.slots == 1 else round_up(self.row_bytes)

    @property
    def extent_bytes(self) -> int:
        """Bytes of volume that the extent takes."""
        return round_up(self.num_layers * self.row_stride_bytes)

    def slice_offset_bytes(self, slot: int, layer: int) -> int:
        """Where a slice begins, from the extent's begin."""
        return layer * self.row_stride_bytes + slot * self.slice_bytes

    @property
    def pitch_bytes_max(self) -> int:
        """The pitch of an encoded row in which no frame is shorter than its slice."""
        return round_up(frame_bytes_max(self.slice_bytes), PITCH_MULTIPLE_BYTES)

    def may_be_encoded(self, extent_bytes_max: int) -> bool:
        """Whether frames save anything, and even those of slices that do not get shorter fit: a
        row of one frame is rounded up to whole blocks, too.
        """
        pays = self.slots > 1 or self.slice_bytes >= SINGLE_SLICE_BYTES_MIN
        return pays and self.encoded_bytes_max <= extent_bytes_max

    @property
    def encoded_bytes_max(self) -> int:
        """The most that the extent may take with its slices encoded."""
        return self.num_layers * round_up(self.slots * self.pitch_bytes_max)


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Where the frames of an extent with encoded slices lie: slice l of slot j is a frame in the
    `pitches[l]` bytes at `row_offset_bytes(l) + j * pitches[l]`. Rows are whole blocks.
    """

    slots: int
    pitches: tuple[int, ...]
    _row_ends: tuple[int, ...]

    @classmethod
    def of(cls, slots: int, pitches: Sequence[int]) -> EncodedRows:
        """One pitch a row, as many rows as layers."""
        ends = accumulate(round_up(slots * pitch) for pitch in pitches)
        return cls(slots, tuple(pitches), tuple(ends))

    def row_offset_bytes(self, layer: int) -> int:
        """Where a row begins, from the extent's begin."""
        return self._row_ends[layer - 1] if layer else 0

    def locate(self, offset_bytes: int) -> tuple[int, int]:
        """Layer and slot of the frame that begins at an offset from the extent's begin."""
        layer = bisect.bisect_right(self._row_ends, offset_bytes)
        in_row = offset_bytes - self.row_offset_bytes(layer)
        slot, within_bytes = divmod(in_row, self.pitches[layer])
        assert within_bytes == 0, "frames are read whole"
        return layer, slot

    @property
    def extent_bytes(self) -> int:
        """Bytes of volume that the extent takes."""
        return self._row_ends[-1]


def slots_for(
    num_layers: int,
    slice_bytes: int,
    row_bytes: int,
    extent_bytes_max: int,
    *,
    encoded: bool = False,
) -> int:
    """Slots of a full extent: as many as fill a row of about `row_bytes`, within the maximum.

    Where a few slots fewer make the row whole blocks, so that no row is padded, it is those.
    `encoded`: the extent has to be within the maximum even if no slice gets shorter.
    """
    most = min(SLOTS_MAX, max(1, row_bytes // slice_bytes))
    while most > 1 and _bytes_of(most, num_layers, slice_bytes, encoded) > extent_bytes_max:
        most -= 1
    for slots in range(most, most - most // 8, -1):
        if slots * slice_bytes % BLOCK_BYTES == 0:
            return slots
    return most


def _bytes_of(slots: int, num_layers: int, slice_bytes: int, encoded: bool) -> int:
    geometry = Geometry(slots, num_layers, slice_bytes)
    return geometry.encoded_bytes_max if encoded else geometry.extent_bytes


def split_into_extents(
    chunk_count: int,
    num_layers: int,
    slice_bytes: int,
    row_bytes: int,
    extent_bytes_max: int,
    *,
    encoded: bool = False,
) -> list[Geometry]:
    """Extents for the chunks of one put, in prefix order: full ones, and one for the rest."""
    slots = slots_for(num_layers, slice_bytes, row_bytes, extent_bytes_max, encoded=encoded)
    whole, rest = divmod(chunk_count, slots)
    shapes = [Geometry(slots, num_layers, slice_bytes)] * whole
    if rest:
        shapes.append(Geometry(rest, num_layers, slice_bytes))
    return shapes
