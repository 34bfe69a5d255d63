"""Where the bytes of a put belong, against numpy's transpose of the same chunks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from objectcache_storage_server.engines.base import PrefixShape
from objectcache_storage_server.engines.block_checksums import slice_block_bytes

GEOMETRIES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 30))


def shape_of(geometry: tuple[int, int, int], layerwise: bool) -> PrefixShape:
    """Of chunk_count, num_layers and slice_bytes."""
    chunk_count, num_layers, slice_bytes = geometry
    keys = tuple(f"k{index}" for index in range(chunk_count))
    return PrefixShape(keys, num_layers, slice_bytes, layerwise)


@given(GEOMETRIES, st.booleans(), st.integers(1, 7))
def test_a_put_lands_every_byte_where_its_chunk_wants_it(
    geometry: tuple[int, int, int], layerwise: bool, buffer_blocks: int
) -> None:
    chunks = np.random.default_rng(1).integers(0, 256, geometry, np.uint8)
    payload = (chunks.transpose(1, 0, 2) if layerwise else chunks).reshape(-1)
    shape = shape_of(geometry, layerwise)
    block_bytes = slice_block_bytes(shape.slice_bytes)
    stored = np.zeros_like(chunks).reshape(geometry[0], -1)
    for begin in range(0, len(payload), buffer_blocks * block_bytes):
        end = min(begin + buffer_blocks * block_bytes, len(payload))
        while begin < end:
            chunk, offset, room = shape.locate(begin)
            length = min(room, end - begin)
            assert offset % block_bytes == length % block_bytes == 0
            stored[chunk, offset : offset + length] = payload[begin : begin + length]
            begin += length
    assert shape.total_bytes == len(payload)
    assert shape.chunk_bytes == chunks[0].size
    assert (stored == chunks.reshape(geometry[0], -1)).all()


@given(GEOMETRIES, st.booleans(), st.data())
def test_a_byte_is_located_from_anywhere_within_its_run(
    geometry: tuple[int, int, int], layerwise: bool, data: st.DataObject
) -> None:
    shape = shape_of(geometry, layerwise)
    position = data.draw(st.integers(0, shape.total_bytes - 1))
    chunk, offset, room = shape.locate(position)
    step = data.draw(st.integers(0, room - 1))
    assert shape.locate(position + step) == (chunk, offset + step, room - step)
