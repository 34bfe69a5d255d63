"""Plans against an oracle: numpy's transpose of the same bytes, for any geometry."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import Limits
from objectcache_storage_server.engines.base import Placement
from objectcache_storage_server.plan import (
    Plan,
    RangePlan,
    chunk_put_plan,
    object_put_plan,
    plan_chunks,
    slice_block_bytes,
    target_fragment_bytes,
)

LAYERWISE, CHUNKWISE = DeliveryMode.LAYERWISE, DeliveryMode.CHUNKWISE
Bytes = npt.NDArray[np.uint8]


def descriptor_of(
    chunk_count: int, num_layers: int, slice_bytes: int, layers: tuple[int, int] | None = None
) -> Descriptor:
    keys = tuple(f"k{index}" for index in range(chunk_count))
    return Descriptor(keys, num_layers, 16, slice_bytes, LAYERWISE, layers)


def carry_out(plan: Plan, sources: dict[int, Bytes]) -> Bytes:
    """The payload that a plan's reads produce, checking that they fill it exactly once."""
    payload = np.zeros(plan.payload_bytes, np.uint8)
    filled = np.zeros(plan.payload_bytes, np.uint8)
    expected_offset = 0
    for fragment in plan.fragments():
        assert fragment.offset_bytes == expected_offset
        expected_offset += fragment.length_bytes
        for read in plan.reads(fragment):
            start = fragment.offset_bytes + read.landing_offset_bytes
            piece = slice(start, start + read.length_bytes)
            source = sources[read.source]
            payload[piece] = source[read.offset_bytes : read.offset_bytes + read.length_bytes]
            filled[piece] += 1
    assert expected_offset == plan.payload_bytes
    assert (filled == 1).all()
    return payload


@st.composite
def cases(draw: st.DrawFn) -> tuple[Bytes, tuple[int, int], DeliveryMode, int, int]:
    chunk_count = draw(st.integers(1, 9))
    num_layers = draw(st.integers(1, 6))
    slice_bytes = draw(st.integers(1, 40))
    first = draw(st.integers(0, num_layers - 1))
    end = draw(st.integers(first + 1, num_layers))
    mode = draw(st.sampled_from([LAYERWISE, CHUNKWISE]))
    fragment_bytes = draw(st.integers(1, 200))
    slots = draw(st.integers(1, 4))
    seed = draw(st.integers(0, 1000))
    shape = (chunk_count, num_layers, slice_bytes)
    chunks = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return chunks, (first, end), mode, fragment_bytes, slots


def extents(chunks: Bytes, slots: int) -> tuple[dict[int, Bytes], list[Placement]]:
    """Lay chunks out in extents of `slots`, layer-major across the slots; the first starts at 7."""
    chunk_count, num_layers, slice_bytes = chunks.shape
    sources: dict[int, Bytes] = {}
    places: list[Placement] = []
    for index in range(chunk_count):
        extent, slot = divmod(index, slots)
        if extent not in sources:
            sources[extent] = np.zeros(7 + num_layers * slots * slice_bytes, np.uint8)
        place = Placement(extent, 7 + slot * slice_bytes, slots)
        for layer in range(num_layers):
            start = place.base_bytes + layer * slots * slice_bytes
            sources[extent][start : start + slice_bytes] = chunks[index, layer]
        places.append(place)
    return sources, places


@given(cases())
@settings(max_examples=300, deadline=None)
def test_any_plan_delivers_the_transpose_of_the_chunks(
    case: tuple[Bytes, tuple[int, int], DeliveryMode, int, int],
) -> None:
    chunks, (first, end), mode, fragment_bytes, slots = case
    chunk_count, num_layers, slice_bytes = chunks.shape
    sources, places = extents(chunks, slots)
    descriptor = descriptor_of(chunk_count, num_layers, slice_bytes, (first, end))
    plan = plan_chunks(descriptor, places, mode, fragment_bytes)
    wanted = chunks[:, first:end]
    expected = wanted.transpose(1, 0, 2) if mode is LAYERWISE else wanted
    assert (carry_out(plan, sources) == expected.reshape(-1)).all()


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_watermark_rises_only_over_complete_layers_in_any_order_of_fragments(
    case: tuple[Bytes, tuple[int, int], DeliveryMode, int, int], random: Random
) -> None:
    chunks, (first, end), mode, fragment_bytes, slots = case
    chunk_count, num_layers, slice_bytes = chunks.shape
    _, places = extents(chunks, slots)
    descriptor = descriptor_of(chunk_count, num_layers, slice_bytes, (first, end))
    plan = plan_chunks(descriptor, places, mode, fragment_bytes)
    fragments = list(plan.fragments())
    missing = (
        [
            sum(f.length_bytes for f in fragments if f.first_layer <= n < f.end_layer)
            for n in range(num_layers)
        ]
        if mode is LAYERWISE
        else []
    )
    random.shuffle(fragments)
    progress = plan.progress()
    watermark = first
    for fragment in fragments:
        moved = progress.finish(fragment)
        if moved is not None:
            assert moved > watermark
            watermark = moved
        if mode is LAYERWISE:
            missing[fragment.first_layer] -= fragment.length_bytes
            complete = first
            while complete < end and missing[complete] == 0:
                complete += 1
            assert watermark == complete
    assert watermark == end == progress.end_layer


def test_a_layer_of_one_whole_extent_is_one_read() -> None:
    places = [Placement(3, slot * 64, 16) for slot in range(16)]
    plan = plan_chunks(descriptor_of(16, 4, 64), places, LAYERWISE, 1 << 20)
    reads = [plan.reads(fragment) for fragment in plan.fragments()]
    assert [[tuple(read) for read in one] for one in reads] == [
        [(3, layer * 16 * 64, 16 * 64, 0)] for layer in range(4)
    ]


def test_a_chunk_on_its_own_is_one_read_chunkwise() -> None:
    plan = plan_chunks(
        descriptor_of(2, 4, 64), [Placement(0, 0), Placement(1, 0)], CHUNKWISE, 1 << 20
    )
    (fragment,) = plan.fragments()
    assert [tuple(read) for read in plan.reads(fragment)] == [(0, 0, 256, 0), (1, 0, 256, 256)]


def test_layerwise_fragments_never_span_two_layers() -> None:
    places = [Placement(index, 0) for index in range(5)]
    plan = plan_chunks(descriptor_of(5, 3, 10), places, LAYERWISE, 20)
    assert [(f.first_layer, f.length_bytes) for f in plan.fragments()] == [
        (layer, length) for layer in range(3) for length in (20, 20, 10)
    ]


@given(size=st.integers(0, 500), start=st.integers(0, 500), fragment_bytes=st.integers(1, 100))
def test_a_range_plan_delivers_the_range(size: int, start: int, fragment_bytes: int) -> None:
    data = np.arange(1001, dtype=np.uint8)
    plan = RangePlan(Placement(0, 1), start, size, fragment_bytes)
    assert (carry_out(plan, {0: data}) == data[1 + start : 1 + start + size]).all()
    ends = [start + f.offset_bytes + f.length_bytes for f in plan.fragments()]
    assert all(end % fragment_bytes == 0 for end in ends[:-1])


def test_a_descriptor_of_10000_chunks_is_planned_without_listing_its_reads() -> None:
    keys = tuple(f"{index:064x}" for index in range(10_000))
    raw = Descriptor(keys, 32, 16, 65_536).to_bytes()
    places = [Placement(index, 0) for index in range(10_000)]
    descriptor = Descriptor.from_bytes(raw, Limits())
    plan = plan_chunks(descriptor, places, LAYERWISE, 2 << 20)
    first = next(plan.fragments())
    assert len(plan.reads(first)) == 32
    assert plan.payload_bytes == 10_000 * 32 * 65_536


@given(
    chunk_count=st.integers(1, 5),
    num_layers=st.integers(1, 4),
    slice_bytes=st.integers(1, 30),
    layerwise=st.booleans(),
    buffer_units=st.integers(1, 7),
)
def test_a_put_lands_every_byte_where_its_chunk_wants_it(
    chunk_count: int, num_layers: int, slice_bytes: int, layerwise: bool, buffer_units: int
) -> None:
    shape = (chunk_count, num_layers, slice_bytes)
    chunks = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    payload = (chunks.transpose(1, 0, 2) if layerwise else chunks).tobytes()
    keys = tuple(f"k{index}" for index in range(chunk_count))
    mode = LAYERWISE if layerwise else CHUNKWISE
    plan = chunk_put_plan(Descriptor(keys, num_layers, 16, slice_bytes, mode))
    stored = np.zeros_like(chunks).reshape(chunk_count, -1)
    buffer_bytes = plan.buffer_bytes(buffer_units * slice_bytes)
    for position in range(0, len(payload), buffer_bytes):
        data = payload[position : position + buffer_bytes]
        for index, offset, start, length in plan.landings(position, len(data)):
            assert offset % plan.block_bytes == 0
            assert length % plan.block_bytes == 0
            piece = np.frombuffer(data[start : start + length], np.uint8)
            stored[index, offset : offset + length] = piece
    assert plan.total_bytes == len(payload)
    assert (stored == chunks.reshape(chunk_count, -1)).all()


def test_an_object_of_unknown_length_lands_as_it_comes() -> None:
    plan = object_put_plan(None)
    assert plan.total_bytes is None
    assert [tuple(one) for one in plan.landings(1 << 20, 10)] == [(0, 1 << 20, 0, 10)]


@pytest.mark.parametrize(
    ("slice_bytes", "block_bytes"),
    [(1, 1), (18_432, 18_432), (1 << 20, 1 << 20), (2 << 20, 1 << 20), (3 << 19, 3 << 18)],
)
def test_a_slice_is_whole_checksum_blocks(slice_bytes: int, block_bytes: int) -> None:
    assert slice_block_bytes(slice_bytes) == block_bytes


def test_a_large_slice_without_a_usable_divisor_is_refused_with_the_remedy() -> None:
    with pytest.raises(InvalidRequest, match="pad the slice"):
        slice_block_bytes(1_048_583)


@pytest.mark.parametrize(
    ("layer_bytes", "expected"),
    [(1 << 20, 2 << 20), (16 << 20, 4 << 20), (1 << 30, 8 << 20)],
)
def test_a_targets_fragments_grow_with_its_layers(layer_bytes: int, expected: int) -> None:
    assert target_fragment_bytes(layer_bytes, 2, 2 << 20, 8 << 20) == expected
