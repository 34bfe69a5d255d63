"""Extents as arithmetic: how many slots, how long, and where a slice lies. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES

SLOTS_MAX = 256  # of one extent; more would only make the rows of short prefixes thinner


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


def slots_for(num_layers: int, slice_bytes: int, row_bytes: int, extent_bytes_max: int) -> int:
    """Slots of a full extent: as many as fill a row of about `row_bytes`, within the maximum.

    Where a few slots fewer make the row whole blocks, so that no row is padded, it is those.
    """
    most = min(SLOTS_MAX, max(1, row_bytes // slice_bytes))
    while most > 1 and Geometry(most, num_layers, slice_bytes).extent_bytes > extent_bytes_max:
        most -= 1
    for slots in range(most, most - most // 8, -1):
        if slots * slice_bytes % BLOCK_BYTES == 0:
            return slots
    return most


def split_into_extents(
    chunk_count: int, num_layers: int, slice_bytes: int, row_bytes: int, extent_bytes_max: int
) -> list[Geometry]:
    """Extents for the chunks of one put, in prefix order: full ones, and one for the rest."""
    slots = slots_for(num_layers, slice_bytes, row_bytes, extent_bytes_max)
    whole, rest = divmod(chunk_count, slots)
    shapes = [Geometry(slots, num_layers, slice_bytes)] * whole
    if rest:
        shapes.append(Geometry(rest, num_layers, slice_bytes))
    return shapes
