"""Extents as arithmetic."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.local.space.extent_geometry import (
    SLOTS_MAX,
    EncodedRows,
    Geometry,
    slots_for,
    split_into_extents,
)
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES

GEOMETRIES = st.builds(
    Geometry, st.integers(1, 20), st.integers(1, 8), st.integers(1, 3 * BLOCK_BYTES)
)


@given(GEOMETRIES)
def test_no_two_slices_share_a_byte_and_all_lie_in_the_extent(geometry: Geometry) -> None:
    owners = np.zeros(geometry.extent_bytes, np.uint8)
    for slot in range(geometry.slots):
        for layer in range(geometry.num_layers):
            begin = geometry.slice_offset_bytes(slot, layer)
            owners[begin : begin + geometry.slice_bytes] += 1
    assert owners.max() == 1
    assert int(owners.sum()) == geometry.slots * geometry.chunk_bytes


@given(GEOMETRIES)
def test_a_row_of_neighbours_is_one_run_that_begins_at_a_block(geometry: Geometry) -> None:
    for layer in range(geometry.num_layers):
        begin = geometry.slice_offset_bytes(0, layer)
        last = geometry.slice_offset_bytes(geometry.slots - 1, layer)
        assert last - begin == geometry.row_bytes - geometry.slice_bytes
        assert geometry.slots == 1 or begin % BLOCK_BYTES == 0


@given(GEOMETRIES, st.data())
def test_no_two_frames_share_a_byte_and_a_row_of_them_is_one_run(
    geometry: Geometry, data: st.DataObject
) -> None:
    units = st.integers(1, geometry.pitch_bytes_max // 64)
    pitches = [64 * data.draw(units) for _ in range(geometry.num_layers)]
    rows = EncodedRows.of(geometry.slots, pitches)
    assert rows.extent_bytes <= geometry.encoded_bytes_max
    owners = np.zeros(rows.extent_bytes, np.uint8)
    for layer, pitch in enumerate(pitches):
        begin = rows.row_offset_bytes(layer)
        assert begin % BLOCK_BYTES == 0
        owners[begin : begin + geometry.slots * pitch] += 1
    assert owners.max() == 1
    assert int(owners.sum()) == geometry.slots * sum(pitches)


@given(st.integers(1, 20), st.integers(1, 64 * KIB), st.integers(64 * KIB, 4 * MIB))
def test_a_full_extent_is_within_the_maximum_even_if_no_slice_gets_shorter(
    num_layers: int, slice_bytes: int, extent_bytes_max: int
) -> None:
    slots = slots_for(num_layers, slice_bytes, 256 * KIB, extent_bytes_max, encoded=True)
    geometry = Geometry(slots, num_layers, slice_bytes)
    assert slots == 1 or geometry.encoded_bytes_max <= extent_bytes_max


def test_one_slot_is_a_plain_run() -> None:
    geometry = Geometry(1, 3, 5000)
    assert [geometry.slice_offset_bytes(0, layer) for layer in range(3)] == [0, 5000, 10_000]
    assert geometry.extent_bytes == 4 * BLOCK_BYTES


def test_rows_are_about_a_mebibyte_and_whole_blocks_where_that_can_be() -> None:
    assert slots_for(32, 64 * KIB, 1 * MIB, 64 * MIB) == 16
    assert slots_for(60, 18 * KIB, 1 * MIB, 64 * MIB) == 56  # 56 x 18 KiB is 252 blocks
    assert slots_for(32, 1 * MIB, 1 * MIB, 64 * MIB) == 1
    assert slots_for(32, 3 * MIB, 1 * MIB, 64 * MIB) == 1
    assert slots_for(2, 16, 1 * MIB, 64 * MIB) == SLOTS_MAX


def test_an_extent_stays_below_its_maximum() -> None:
    assert slots_for(64, 64 * KIB, 1 * MIB, 32 * MIB) == 8
    assert slots_for(512, 64 * KIB, 1 * MIB, 32 * MIB) == 1


@given(
    st.integers(1, 1000),
    st.integers(1, 40),
    st.integers(1, 200_000),
    st.integers(4 * KIB, 2 * MIB),
    st.integers(1 * MIB, 8 * MIB),
)
def test_a_put_is_split_into_full_extents_and_a_rest(
    chunk_count: int, num_layers: int, slice_bytes: int, row_bytes: int, extent_bytes_max: int
) -> None:
    shapes = split_into_extents(chunk_count, num_layers, slice_bytes, row_bytes, extent_bytes_max)
    assert sum(shape.slots for shape in shapes) == chunk_count
    assert len({shape.slots for shape in shapes[:-1]}) <= 1
    assert shapes[-1].slots <= shapes[0].slots
    for shape in shapes:
        assert shape.slots == 1 or shape.extent_bytes <= extent_bytes_max
        assert shape.slots == 1 or shape.row_bytes <= row_bytes
