"""Plans against an oracle: numpy's transpose of the same bytes, for any geometry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_schemas.errors import InvalidRequest
from objectcache_schemas.limits import Limits
from objectcache_storage_server.deliveries.plan import (
    ChunkPlan,
    Plan,
    RangePlan,
    plan_chunks,
    target_fragment_bytes,
)
from objectcache_storage_server.engines.base import Placement
from objectcache_storage_server.engines.block_checksums import slice_block_bytes
from tests.unit.examples import examples

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


@dataclass(frozen=True)
class Stored:
    """How the chunks of one extent lie: slots, and the slice they were stored in."""

    slots: int
    slice_bytes: int
    padding_bytes: int  # after each row

    @property
    def stride_bytes(self) -> int:
        return self.slots * self.slice_bytes + self.padding_bytes


@dataclass(frozen=True)
class Case:
    """Chunks as uint8[chunk_count, num_layers, slice_bytes], where they lie, and what is asked."""

    chunks: Bytes
    sources: dict[int, Bytes]
    places: list[Placement]
    layers: tuple[int, int]
    mode: DeliveryMode
    fragment_bytes: int

    def plan(self) -> ChunkPlan:
        chunk_count, num_layers, slice_bytes = self.chunks.shape
        descriptor = descriptor_of(chunk_count, num_layers, slice_bytes, self.layers)
        return plan_chunks(descriptor, self.places, self.mode, self.fragment_bytes)


@st.composite
def cases(draw: st.DrawFn, *, same_slices: bool = False) -> Case:
    # The slots of one layer alone may go on in the next extent.
    num_layers = draw(st.integers(2 if same_slices else 1, 6))
    slice_bytes = draw(st.integers(1, 40))
    first = draw(st.integers(0, num_layers - 1))
    chunk_bytes = num_layers * slice_bytes
    divisors = [d for d in range(1, chunk_bytes + 1) if chunk_bytes % d == 0]
    stored_slices = st.just(slice_bytes) if same_slices else st.sampled_from(divisors)
    stored = st.builds(Stored, st.integers(1, 5), stored_slices, st.sampled_from([0, 0, 3, 16]))
    extents = draw(st.lists(stored, min_size=1, max_size=4))
    slots = [(number, slot) for number, one in enumerate(extents) for slot in range(one.slots)]
    taken = draw(st.permutations(slots)) if draw(st.booleans()) else slots
    taken = taken[: draw(st.integers(1, len(taken)))]
    shape = (len(taken), num_layers, slice_bytes)
    chunks = np.random.default_rng(draw(st.integers(0, 1000))).integers(0, 256, shape, np.uint8)
    sources, places = lay_out(chunks, extents, taken, draw(st.booleans()))
    return Case(
        chunks,
        sources,
        places,
        (first, draw(st.integers(first + 1, num_layers))),
        draw(st.sampled_from([LAYERWISE, CHUNKWISE])),
        draw(st.integers(1, 200)),
    )


def lay_out(
    chunks: Bytes, extents: list[Stored], taken: list[tuple[int, int]], one_source: bool
) -> tuple[dict[int, Bytes], list[Placement]]:
    """Store each chunk in its extent and slot; extents are a source each, or follow each other in
    one. The first byte of a source is at 7.
    """
    chunk_bytes = chunks[0].size
    bases = [7]
    for one in extents:
        rows = chunk_bytes // one.slice_bytes
        bases.append(bases[-1] + rows * one.stride_bytes)
    memory = np.zeros(bases[-1], np.uint8)
    places: list[Placement] = []
    for chunk, (number, slot) in zip(chunks, taken, strict=True):
        one = extents[number]
        base = bases[number] + slot * one.slice_bytes
        for row, begin in enumerate(range(0, chunk_bytes, one.slice_bytes)):
            start = base + row * one.stride_bytes
            piece = chunk.reshape(-1)[begin : begin + one.slice_bytes]
            memory[start : start + one.slice_bytes] = piece
        shift = 0 if one_source else bases[number] - 7
        in_one_run = one.stride_bytes == one.slice_bytes
        shape = (0, 0) if in_one_run else (one.slice_bytes, one.stride_bytes)
        places.append(Placement(0 if one_source else number, base - shift, *shape))
    if one_source:
        return {0: memory}, places
    return {number: memory[bases[number] - 7 :] for number in range(len(extents))}, places


@given(cases())
@settings(max_examples=examples(100), deadline=None)
def test_any_plan_delivers_the_transpose_of_the_chunks(case: Case) -> None:
    wanted = case.chunks[:, slice(*case.layers)]
    expected = wanted.transpose(1, 0, 2) if case.mode is LAYERWISE else wanted
    assert (carry_out(case.plan(), case.sources) == expected.reshape(-1)).all()


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=examples(25), deadline=None)
def test_the_watermark_rises_only_over_complete_layers_in_any_order_of_fragments(
    case: Case, random: Random
) -> None:
    first, end = case.layers
    plan = case.plan()
    fragments = list(plan.fragments())
    missing = (
        [
            sum(f.length_bytes for f in fragments if f.first_layer <= n < f.end_layer)
            for n in range(case.chunks.shape[1])
        ]
        if case.mode is LAYERWISE
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
        if case.mode is LAYERWISE:
            missing[fragment.first_layer] -= fragment.length_bytes
            complete = first
            while complete < end and missing[complete] == 0:
                complete += 1
            assert watermark == complete
    assert watermark == end == progress.end_layer


@given(cases(same_slices=True))
@settings(max_examples=examples(50), deadline=None)
def test_a_layerwise_fragment_is_cut_within_neighbours_only_where_they_fill_it(case: Case) -> None:
    case = replace(case, mode=LAYERWISE)
    slice_bytes = case.chunks.shape[2]
    plan = case.plan()
    for fragment in plan.fragments() if slice_bytes <= case.fragment_bytes else ():
        end = fragment.end_chunk
        if end < len(case.places) and are_neighbours(case.places, end, slice_bytes):
            assert fragment.length_bytes == case.fragment_bytes // slice_bytes * slice_bytes
            assert len(plan.reads(fragment)) == 1


def are_neighbours(places: list[Placement], index: int, slice_bytes: int) -> bool:
    """Whether a chunk lies beside the one before it, in every layer."""
    before, place = places[index - 1], places[index]
    return before.slice_bytes > 0 and place == before._replace(
        base_bytes=before.base_bytes + slice_bytes
    )


@given(cases(same_slices=True))
@settings(max_examples=examples(50), deadline=None)
def test_neighbours_in_an_extent_are_one_read_of_a_layer(case: Case) -> None:
    case = replace(case, mode=LAYERWISE, fragment_bytes=1 << 20)
    count, slice_bytes = case.chunks.shape[0], case.chunks.shape[2]
    runs = 1 + sum(not are_neighbours(case.places, i, slice_bytes) for i in range(1, count))
    plan = case.plan()
    assert {len(plan.reads(fragment)) for fragment in plan.fragments()} == {runs}


def test_a_layer_of_one_whole_extent_is_one_read() -> None:
    for stride_bytes in (16 * 64, 4096):  # without padding, and padded to a block
        places = [Placement(3, slot * 64, 64, stride_bytes) for slot in range(16)]
        plan = plan_chunks(descriptor_of(16, 4, 64), places, LAYERWISE, 1 << 20)
        reads = [plan.reads(fragment) for fragment in plan.fragments()]
        assert [[tuple(read) for read in one] for one in reads] == [
            [(3, layer * stride_bytes, 16 * 64, 0)] for layer in range(4)
        ]


def test_fragments_end_where_neighbours_end() -> None:
    places = [Placement(extent, slot * 64, 64, 1024) for extent in range(3) for slot in range(16)]
    plan = plan_chunks(descriptor_of(48, 1, 64), places, LAYERWISE, 24 * 64)
    assert [(f.first_chunk, f.end_chunk) for f in plan.fragments()] == [(0, 16), (16, 32), (32, 48)]
    plan = plan_chunks(descriptor_of(48, 1, 64), places, LAYERWISE, 40 * 64)
    assert [(f.first_chunk, f.end_chunk) for f in plan.fragments()] == [(0, 32), (32, 48)]
    plan = plan_chunks(descriptor_of(48, 1, 64), places, LAYERWISE, 12 * 64)
    assert [f.end_chunk for f in plan.fragments()] == [12, 16, 28, 32, 44, 48]


def test_a_chunk_stored_in_other_slices_is_read_in_its_own_runs() -> None:
    places = [Placement(0, slot * 32, 32, 128) for slot in range(2)]  # as 4 layers of 32
    plan = plan_chunks(descriptor_of(2, 2, 64), places, LAYERWISE, 1 << 20)
    reads = [plan.reads(fragment) for fragment in plan.fragments()]
    assert [[tuple(read) for read in one] for one in reads] == [
        [(0, start, 32, 32 * index) for index, start in enumerate(starts)]
        for starts in ((0, 128, 32, 160), (256, 384, 288, 416))
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


@given(
    slice_bytes=st.integers(1, 60),
    padding_bytes=st.integers(0, 60),
    fragment_bytes=st.integers(1, 200),
    bounds=st.tuples(st.integers(0, 500), st.integers(0, 500)),
)
def test_a_range_of_an_interleaved_chunk_is_exact(
    slice_bytes: int, padding_bytes: int, fragment_bytes: int, bounds: tuple[int, int]
) -> None:
    data = np.random.default_rng(4).integers(0, 256, 500, np.uint8)
    stride_bytes = slice_bytes + padding_bytes
    memory = np.zeros(3 + -(-500 // slice_bytes) * stride_bytes, np.uint8)
    for layer, begin in enumerate(range(0, 500, slice_bytes)):
        piece = data[begin : begin + slice_bytes]
        memory[3 + layer * stride_bytes :][: len(piece)] = piece
    start, end = sorted(bounds)
    place = Placement(0, 3, slice_bytes, stride_bytes)
    plan = RangePlan(place, start, end - start, fragment_bytes)
    assert (carry_out(plan, {0: memory}) == data[start:end]).all()


def test_a_descriptor_of_10000_chunks_is_planned_without_listing_its_reads() -> None:
    keys = tuple(f"{index:064x}" for index in range(10_000))
    raw = Descriptor(keys, 32, 16, 65_536).to_bytes()
    places = [Placement(index, 0) for index in range(10_000)]
    descriptor = Descriptor.from_bytes(raw, Limits())
    plan = plan_chunks(descriptor, places, LAYERWISE, 2 << 20)
    first = next(plan.fragments())
    assert len(plan.reads(first)) == 32
    assert plan.payload_bytes == 10_000 * 32 * 65_536


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
    [
        (1 << 20, 2 << 20),  # no less than anywhere else
        (8 << 20, 4 << 20),
        (16 << 20, 8 << 20),
        (28 << 20, 7 << 20),  # two for each reader
        (1 << 30, 8 << 20),
    ],
)
def test_a_targets_fragments_are_large_and_as_many_for_each_reader(
    layer_bytes: int, expected: int
) -> None:
    assert target_fragment_bytes(layer_bytes, 2, 2 << 20, 8 << 20) == expected


def test_an_engine_with_many_reads_under_way_says_how_large_they_are() -> None:
    assert target_fragment_bytes(28 << 20, 2, 2 << 20, 8 << 20, read_bytes=4 << 20) == 4 << 20
    assert target_fragment_bytes(1 << 20, 2, 2 << 20, 8 << 20, read_bytes=4 << 20) == 4 << 20
    assert target_fragment_bytes(28 << 20, 2, 1 << 20, 1 << 20, read_bytes=4 << 20) == 1 << 20
