"""Extents and their objects as arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from objectcache_schemas.limits import KIB, MIB
from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from objectcache_storage_server.engines.shared.extents.cut_extents import (
    EXTENT_BYTES_MAX,
    SLOTS_MAX,
    cut_object,
    cut_prefix,
)
from objectcache_storage_server.engines.shared.versions import ExtentShape

BUFFERS = 512 * MIB


def cut(
    chunk_count: int, num_layers: int, slice_bytes: int, *, layerwise: bool = True
) -> list[ExtentShape]:
    keys = [f"{number}" for number in range(chunk_count)]
    return cut_prefix(PrefixShape(keys, num_layers, slice_bytes, layerwise), 4 * MIB, BUFFERS)


def test_a_row_of_64_slices_of_64_kib_is_an_object() -> None:
    assert cut(448, 32, 64 * KIB) == [ExtentShape(64, 32, 64 * KIB, 4 * MIB)] * 7


def test_the_chunks_that_are_left_over_have_an_extent_whose_objects_hold_several_layers() -> None:
    *full, rest = cut(130, 32, 64 * KIB)
    assert full == [ExtentShape(64, 32, 64 * KIB, 4 * MIB)] * 2
    assert rest == ExtentShape(2, 32, 64 * KIB, 4 * MIB)  # 32 layers of 128 KiB


def test_longer_slices_have_fewer_neighbours_and_short_ones_several_layers_an_object() -> None:
    assert cut(40, 8, 256 * KIB)[0] == ExtentShape(16, 8, 256 * KIB, 4 * MIB)
    assert cut(64, 32, 4 * KIB) == [ExtentShape(64, 32, 4 * KIB, 4 * MIB)]
    assert cut(64, 100, 4 * KIB) == [ExtentShape(64, 100, 4 * KIB, 4 * MIB)]
    assert cut(64, 100, 100 * KIB)[0] == ExtentShape(40, 100, 100 * KIB, 4000 * KIB)


def test_a_slice_over_an_object_is_cut_at_checksum_blocks() -> None:
    slice_bytes = 6 * MIB
    (shape,) = cut(1, 3, slice_bytes)
    assert (shape.slots, shape.object_bytes % slice_block_bytes(slice_bytes)) == (1, 0)
    assert shape.object_bytes <= 4 * MIB


def test_what_comes_chunkwise_is_gathered_in_a_bounded_extent() -> None:
    layerwise, chunkwise = (cut(64, 80, 64 * KIB, layerwise=each)[0] for each in (True, False))
    assert (layerwise.slots, chunkwise.slots) == (64, EXTENT_BYTES_MAX // (80 * 64 * KIB))
    assert chunkwise.size_bytes <= EXTENT_BYTES_MAX


def test_layers_of_many_extents_are_gathered_in_bounded_memory() -> None:
    shapes = cut(20_000, 64, 4 * KIB)
    gathered_bytes = sum(shape.object_bytes for shape in shapes)
    assert len(shapes) == 313
    assert {shape.object_bytes for shape in shapes[:-1]} == {256 * KIB}  # a row each
    assert gathered_bytes < EXTENT_BYTES_MAX


def test_objects_on_their_own_are_cut_at_blocks_where_one_fits() -> None:
    assert cut_object(64 * KIB, 4 * MIB) == 4 * MIB
    assert cut_object(1000, 4096) == 4000
    assert cut_object(5000, 4096) == 4096


@given(
    chunk_count=st.integers(1, 300),
    num_layers=st.integers(1, 100),
    slice_bytes=st.integers(1, 300_000),
    layerwise=st.booleans(),
    object_bytes_max=st.integers(1000, 8 * MIB),
    buffer_bytes_max=st.integers(1, 600 * MIB),
)
def test_extents_hold_all_chunks_in_objects_of_whole_layers_that_the_store_takes(
    chunk_count: int,
    num_layers: int,
    slice_bytes: int,
    layerwise: bool,
    object_bytes_max: int,
    buffer_bytes_max: int,
) -> None:
    keys = [f"{number}" for number in range(chunk_count)]
    shape = PrefixShape(keys, num_layers, slice_bytes, layerwise)
    shapes = cut_prefix(shape, object_bytes_max, buffer_bytes_max)
    slots = [each.slots for each in shapes]
    assert sum(slots) == chunk_count
    assert set(slots[:-1]) <= {slots[0]}
    assert slots[-1] <= slots[0] <= SLOTS_MAX
    for each in shapes:
        assert 0 < each.object_bytes <= object_bytes_max
        row_bytes = each.slots * slice_bytes
        assert row_bytes > object_bytes_max or each.object_bytes % row_bytes == 0
        assert each.slots == 1 or layerwise or each.size_bytes <= EXTENT_BYTES_MAX
        assert each.slots == 1 or row_bytes <= object_bytes_max
