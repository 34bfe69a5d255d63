"""Plans of payloads with frames in them, against what the directory says, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_encodings.frames import ENCODINGS, SliceCodec
from objectcache_encodings.payload_directory import PayloadDirectory
from objectcache_schemas.descriptor import DeliveryMode, Descriptor
from objectcache_storage_server.deliveries.encoded.directory_objects import (
    DIRECTORY,
    DirectoryObjects,
)
from objectcache_storage_server.deliveries.encoded.encoded_plan import EncodedPlan
from objectcache_storage_server.deliveries.encoded.framed_payload import (
    FramedPayload,
    framed_payload,
)
from objectcache_storage_server.engines.base import (
    FramePlace,
    FrameRows,
    OpenObjects,
    Placement,
    Read,
)
from tests.unit.examples import examples

Bytes = npt.NDArray[np.uint8]
ZSTD, DEFLATE = SliceCodec.PLANES_ZSTD, SliceCodec.PLANES_DEFLATE


class Extent(NamedTuple):
    """Neighbours, plain or in frames of one codec; `gaps` lie between the rows of frames."""

    codec: SliceCodec
    pitches: tuple[int, ...]
    taken: tuple[int, ...]  # slots that the prefix has, in its order


@dataclass(frozen=True)
class Case:
    """A prefix of chunks in such extents, and what is asked of it."""

    num_layers: int
    slice_bytes: int
    layers: tuple[int, int]
    extents: Sequence[Extent]
    takes: tuple[str, ...]
    seed: int

    @property
    def chunk_count(self) -> int:
        return sum(len(extent.taken) for extent in self.extents)

    def descriptor(self) -> Descriptor:
        keys = tuple(f"k{number}" for number in range(self.chunk_count))
        return Descriptor(
            keys,
            self.num_layers,
            16,
            self.slice_bytes,
            DeliveryMode.LAYERWISE,
            self.layers,
            encodings=self.takes,
        )


class Store(OpenObjects):
    """The case's bytes at their addresses: of each extent a plain source, and one of frames."""

    def __init__(self, case: Case) -> None:
        self.infos = [None] * case.chunk_count
        random = Random(case.seed)
        self._sources: dict[int, Bytes] = {}
        self._places: list[Placement] = []
        self._frames: list[FramePlace | None] = []
        self.slices: list[list[bytes]] = []  # of each chunk, of each layer
        self.frame_bytes: list[list[bytes]] = []
        count = len(case.extents)
        for number, extent in enumerate(case.extents):
            slots = max(extent.taken) + 1
            stride = slots * case.slice_bytes + 3
            plain = bytearray(random.randbytes(stride * case.num_layers))
            ends = [0]
            for pitch in extent.pitches:
                ends.append(ends[-1] + slots * pitch + 5)
            framed = bytearray(random.randbytes(ends[-1]))
            rows = FrameRows(count + number, extent.codec, extent.pitches, tuple(ends[:-1]))
            self._sources[number] = np.frombuffer(plain, np.uint8)
            self._sources[count + number] = np.frombuffer(framed, np.uint8)
            for slot in extent.taken:
                first = slot * case.slice_bytes
                self._places.append(Placement(number, first, case.slice_bytes, stride))
                is_plain = extent.codec is SliceCodec.PLAIN
                self._frames.append(None if is_plain else FramePlace(rows, slot))
                starts = [layer * stride + first for layer in range(case.num_layers)]
                self.slices.append([bytes(plain[at : at + case.slice_bytes]) for at in starts])
                self.frame_bytes.append(
                    [
                        bytes(framed[end + slot * pitch : end + (slot + 1) * pitch])
                        for end, pitch in zip(ends[:-1], extent.pitches, strict=True)
                    ]
                )

    def placements(self) -> Sequence[Placement]:
        return self._places

    def frames(self) -> Sequence[FramePlace | None]:
        return self._frames

    def read_many(self, reads: Sequence[Read], buffer: memoryview) -> None:
        for source, offset_bytes, length_bytes, landing_bytes in reads:
            assert source != DIRECTORY
            data = self._sources[source][offset_bytes : offset_bytes + length_bytes]
            assert data.size == length_bytes
            buffer[landing_bytes : landing_bytes + length_bytes] = data.data

    def close(self) -> None:
        """Nothing is held."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_layers = draw(st.integers(1, 5))
    slice_bytes = draw(st.integers(64, 200))
    codecs = st.sampled_from([SliceCodec.PLAIN, ZSTD, ZSTD, DEFLATE])
    pitches = st.lists(st.integers(1, 110), min_size=num_layers, max_size=num_layers)
    slots = st.lists(st.integers(0, 6), min_size=1, max_size=6, unique=True)
    extent = st.builds(
        Extent, codecs, pitches.map(tuple), slots.map(tuple) | slots.map(sorted).map(tuple)
    )
    first = draw(st.integers(0, num_layers - 1))
    return Case(
        num_layers,
        slice_bytes,
        (first, draw(st.integers(first + 1, num_layers))),
        draw(st.lists(extent, min_size=1, max_size=6)),
        draw(st.sampled_from([("planes-zstd",), ("later", "planes-zstd", "planes-deflate"), ()])),
        draw(st.integers(0, 1000)),
    )


def carried_out(plan: EncodedPlan, opened: OpenObjects) -> bytes:
    """The payload that comes of a plan, whose fragments must cover it and span no two layers."""
    payload = bytearray(plan.payload_bytes)
    reading = plan.reading(opened)
    progress = plan.progress()
    at_bytes, done = 0, plan.first_layer
    offsets = plan.payload.directory.layer_offsets
    for fragment in plan.fragments():
        assert fragment.offset_bytes == at_bytes
        assert 0 < fragment.length_bytes <= plan.fragment_bytes
        at_bytes += fragment.length_bytes
        layer = fragment.first_layer - plan.first_layer
        assert fragment.end_layer == fragment.first_layer + 1
        assert at_bytes <= offsets[layer + 1]
        view = memoryview(payload)[fragment.offset_bytes : at_bytes]
        reading.read_many(plan.reads(fragment), view)
        done = progress.finish(fragment) or done
        assert done == plan.first_layer + (layer + (at_bytes == offsets[layer + 1]))
    assert at_bytes == plan.payload_bytes
    assert progress.end_layer == plan.end_layer
    return bytes(payload)


def expected(case: Case, store: Store, codecs: set[SliceCodec]) -> tuple[list[list[bytes]], int]:
    """For each layer what the wire has of each chunk, and all bytes of that."""
    first, end = case.layers
    is_framed: list[bool] = []
    for extent in case.extents:
        shorter = sum(extent.pitches[first:end]) < (end - first) * case.slice_bytes
        is_framed += [extent.codec in codecs and shorter] * len(extent.taken)
    layers = [
        [
            (store.frame_bytes if framed else store.slices)[chunk][layer]
            for chunk, framed in enumerate(is_framed)
        ]
        for layer in range(first, end)
    ]
    return layers, sum(len(piece) for layer in layers for piece in layer)


@given(cases(), st.integers(0, 900))
@settings(max_examples=examples(200))
def test_a_payload_is_its_directory_and_then_layer_by_layer_frames_or_slices(
    case: Case, more_bytes: int
) -> None:
    store = Store(case)
    descriptor = case.descriptor()
    codecs = {ENCODINGS[name] for name in case.takes if name in ENCODINGS}
    layers, layers_bytes = expected(case, store, codecs)
    plain_bytes = descriptor.payload_bytes(case.chunk_count)
    payload = framed_payload(descriptor, store.frames(), store.placements())
    if payload is None:
        # A directory of fewer runs than this there is not.
        assert layers_bytes + 64 >= plain_bytes or layers_bytes + _longest(case) >= plain_bytes
        return
    assert payload.directory.payload_bytes < plain_bytes
    fragment_bytes = max(payload.slice_bytes_max, case.slice_bytes) + more_bytes
    plan = EncodedPlan(payload, store.placements(), fragment_bytes)
    assert plan.decoded_bytes == plain_bytes
    wire = carried_out(plan, store)
    assert wire[plan.directory_bytes :] == b"".join(piece for layer in layers for piece in layer)
    _check_directory(case, wire[: plan.directory_bytes], payload, layers)


def _longest(case: Case) -> int:
    layer_count = case.layers[1] - case.layers[0]
    return 80 + 4 * case.chunk_count * (2 + layer_count)


def _check_directory(
    case: Case, data: bytes, payload: FramedPayload, layers: list[list[bytes]]
) -> None:
    directory = PayloadDirectory.from_bytes(
        data,
        chunk_count=case.chunk_count,
        layer_count=len(layers),
        slice_bytes=case.slice_bytes,
    )
    assert directory == payload.directory
    for number, pieces in enumerate(layers):
        lengths = [
            row.pitch_bytes for row in directory.rows(number) for _ in range(row.chunk_count)
        ]
        assert lengths == [len(piece) for piece in pieces]


def test_a_directory_longer_than_a_fragment_is_sent_in_several() -> None:
    extents = [Extent(ZSTD, (64,) * 40, (number % 3,)) for number in range(30)]
    case = Case(40, 512, (0, 40), extents, ("planes-zstd",), 3)
    store = Store(case)
    payload = framed_payload(case.descriptor(), store.frames(), store.placements())
    assert payload is not None
    plan = EncodedPlan(payload, store.placements(), 512)
    assert plan.directory_bytes > 4 * plan.fragment_bytes
    wire = carried_out(plan, store)
    assert wire[: plan.directory_bytes] == payload.directory.to_bytes()


def test_neighbours_of_one_extent_are_one_run_and_one_read_a_layer() -> None:
    case = Case(3, 200, (0, 3), [Extent(ZSTD, (64, 128, 64), (1, 2, 3, 4))], ("planes-zstd",), 5)
    store = Store(case)
    payload = framed_payload(case.descriptor(), store.frames(), store.placements())
    assert payload is not None
    assert [run.chunk_count for run in payload.directory.runs] == [4]
    plan = EncodedPlan(payload, store.placements(), 1000)
    lengths = [[read.length_bytes for read in plan.reads(one)] for one in plan.fragments()]
    assert lengths == [[64, 4 * 64], [4 * 128], [4 * 64]]


def test_nothing_is_framed_for_a_reader_of_other_encodings_or_of_none() -> None:
    extent = Extent(DEFLATE, (64, 64), (0, 1))
    for takes in ((), ("planes-zstd",), ("zstd",)):
        case = Case(2, 500, (0, 2), [extent], takes, 1)
        store = Store(case)
        assert framed_payload(case.descriptor(), store.frames(), store.placements()) is None
    case = Case(2, 500, (0, 2), [extent], ("zstd", "planes-deflate"), 1)
    store = Store(case)
    assert framed_payload(case.descriptor(), store.frames(), store.placements()) is not None
    assert framed_payload(case.descriptor(), None, store.placements()) is None


def test_nothing_is_framed_for_a_reader_of_slices_of_another_size() -> None:
    stored = Case(4, 500, (0, 4), [Extent(ZSTD, (64,) * 4, (0, 1))], ("planes-zstd",), 1)
    for num_layers in (2, 8):
        asked = replace(
            stored, num_layers=num_layers, slice_bytes=2000 // num_layers, layers=(0, 2)
        )
        store = Store(stored)
        assert framed_payload(asked.descriptor(), store.frames(), store.placements()) is None


def test_reads_of_a_directory_alone_ask_no_object() -> None:
    case = Case(1, 64, (0, 1), [Extent(ZSTD, (1,), (0,))], ("planes-zstd",), 1)
    reading = DirectoryObjects(Store(case), b"0123456789")
    buffer = memoryview(bytearray(4))
    reading.begin_reads([Read(DIRECTORY, 3, 4, 0)], buffer).finish()
    assert bytes(buffer) == b"3456"
