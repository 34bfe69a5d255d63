"""Frames that are read as they are stored: verified as any bytes, and decoded by nobody here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from objectcache_encodings import SliceCodec, SliceDecoder
from objectcache_schemas.errors import DamagedData
from objectcache_schemas.limits import KIB
from objectcache_schemas.records import BucketPolicy, StoredEncoding, Verification
from objectcache_storage_server.engines.base import (
    FramePlace,
    OpenObjects,
    Placement,
    PrefixShape,
    Read,
    StagedPut,
)
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.volumes.volume import BLOCK_BYTES, Transfer
from objectcache_storage_server.testing import WrappedEngine
from tests.contract.engine_suite import BUCKET
from tests.contract.opened_engines.local_engines import small_local_engine

LAYERS, SLICE_BYTES = 3, 4 * KIB
COUNT = 10  # chunks, of which an extent has fewer


def slices(layer: int, count: int = COUNT) -> npt.NDArray[np.uint8]:
    """bfloat16 of a normal distribution: uint8[count, slice_bytes]."""
    numbers = np.random.default_rng(layer).standard_normal((count, SLICE_BYTES // 2), np.float32)
    return (numbers.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


KEYS = [f"chunk {number}" for number in range(COUNT)]
PAYLOAD = b"".join(slices(layer).tobytes() for layer in range(LAYERS))


@pytest.fixture(params=[-1, 0], ids=["page cache", "past it"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalEngine]:
    opened = small_local_engine(
        tmp_path / "data", page_cache_bytes=request.param, extent_row_bytes=16 * KIB
    )
    opened.create_bucket(BUCKET)
    yield opened
    opened.close()


def put_all(
    engine: LocalEngine,
    encoding: StoredEncoding | None,
    verification: Verification = Verification.FULL,
) -> None:
    engine.set_policy(BUCKET.name, BucketPolicy(encoding=encoding, verification=verification))
    prefix = engine.stage_prefix(
        BUCKET.name, PrefixShape(KEYS, LAYERS, SLICE_BYTES, layerwise=True)
    )
    prefix.write(0, memoryview(PAYLOAD))
    engine.commit([StagedPut(staged, "") for staged in prefix.staged])


def frames_of(opened: OpenObjects) -> list[FramePlace]:
    places = opened.frames()
    assert places is not None
    framed = [place for place in places if place is not None]
    assert len(framed) == len(places)
    return framed


def read_of(place: FramePlace, layer: int, count: int = 1, landing_bytes: int = 0) -> Read:
    """The frames of neighbours from a place on."""
    rows, pitch = place.rows, place.rows.pitches[layer]
    begin_bytes = rows.offsets[layer] + place.slot * pitch
    return Read(rows.source, begin_bytes, count * pitch, landing_bytes)


@pytest.mark.parametrize("encoding", list(StoredEncoding))
def test_frames_are_what_readers_of_the_encoding_decode(
    engine: LocalEngine, encoding: StoredEncoding
) -> None:
    put_all(engine, encoding)
    codec = {
        StoredEncoding.PLANES_ZSTD: SliceCodec.PLANES_ZSTD,
        StoredEncoding.PLANES_DEFLATE: SliceCodec.PLANES_DEFLATE,
    }[encoding]
    with engine.open_many(BUCKET.name, KEYS, are_prefix=True) as opened:
        places = frames_of(opened)
        assert {place.rows.codec for place in places} == {codec}
        assert [place.slot for place in places] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
        for layer in range(LAYERS):
            for first, count in ((0, 4), (1, 2), (5, 3), (8, 2)):
                read = read_of(places[first], layer, count, 7)
                memory = memoryview(bytearray(read.length_bytes + 9))
                opened.read_many([read], memory)
                row = np.frombuffer(memory[7:-2], np.uint8).reshape(count, -1)
                out = np.empty((count, SLICE_BYTES), np.uint8)
                SliceDecoder().decode_row(row, out)
                assert np.array_equal(out, slices(layer)[first : first + count])
                assert memory[:7] == bytes(7)
                assert memory[-2:] == bytes(2)


def slice_read(place: Placement, landing_bytes: int) -> Read:
    """A chunk's slice of layer 1."""
    ((begin_bytes, length_bytes),) = place.runs(SLICE_BYTES, SLICE_BYTES)
    return Read(place.source, begin_bytes, length_bytes, landing_bytes)


def test_frames_slices_and_plain_chunks_are_read_together(engine: LocalEngine) -> None:
    put_all(engine, StoredEncoding.PLANES_ZSTD)
    engine.set_policy(BUCKET.name, BucketPolicy())
    shape = PrefixShape(["plain"], LAYERS, SLICE_BYTES, layerwise=False)
    prefix = engine.stage_prefix(BUCKET.name, shape)
    plain = np.stack([slices(50 + layer, 1)[0] for layer in range(LAYERS)])
    prefix.write(0, memoryview(plain.tobytes()))
    engine.commit([StagedPut(staged, "") for staged in prefix.staged])
    with engine.open_many(BUCKET.name, [*KEYS, "plain"]) as opened:
        places = opened.frames()
        assert places is not None
        assert places[-1] is None
        assert places[0] is not None
        placements = opened.placements()
        frame = read_of(places[0], 1)
        at = frame.length_bytes
        of_slice = slice_read(placements[1], at)
        of_plain = slice_read(placements[COUNT], at + SLICE_BYTES)
        memory = memoryview(bytearray(at + 2 * SLICE_BYTES))
        opened.read_many([of_plain, frame, of_slice], memory)
        out = np.empty(SLICE_BYTES, np.uint8)
        SliceDecoder().decode_into(memory[:at], out)
    assert np.array_equal(out, slices(1)[0])
    assert memory[at : at + SLICE_BYTES] == slices(1)[1].tobytes()
    assert memory[at + SLICE_BYTES :] == plain[1].tobytes()


def test_without_frames_nobody_is_told_of_any(engine: LocalEngine) -> None:
    put_all(engine, None)
    with engine.open_many(BUCKET.name, KEYS) as opened:
        assert opened.frames() is None


def test_an_engine_that_wraps_another_says_the_same(engine: LocalEngine) -> None:
    put_all(engine, StoredEncoding.PLANES_ZSTD)
    with WrappedEngine(engine).open_many(BUCKET.name, KEYS) as opened:
        assert [place.slot for place in frames_of(opened)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def damage(engine: LocalEngine, place: FramePlace, layer: int, within_bytes: int) -> None:
    """Flip a byte of a frame on the device and in the page cache."""
    with engine.index.reading() as view:
        version = view.versions(view.bucket(BUCKET.name).number, [KEYS[2]])[KEYS[2]]
    base = int(engine.holdings.extents.rows[version.extents[0]]["offset_bytes"])
    offset_bytes = base + read_of(place, layer).offset_bytes + within_bytes
    path = next(iter(engine.volume.paths))
    begin = offset_bytes - offset_bytes % BLOCK_BYTES
    block = memoryview(bytearray(BLOCK_BYTES))
    engine.volume.read([Transfer(begin, block)], path)
    block[offset_bytes - begin] ^= 0x20
    engine.volume.write([Transfer(begin, block)], path)


def test_a_damaged_frame_is_found_and_its_chunk_dropped(engine: LocalEngine) -> None:
    put_all(engine, StoredEncoding.PLANES_ZSTD)
    with engine.open_many(BUCKET.name, KEYS) as opened:
        places = frames_of(opened)
        damage(engine, places[2], 1, 100)
        for layer in (0, 2):
            read = read_of(places[0], layer, 4)
            opened.read_many([read], memoryview(bytearray(read.length_bytes)))
        read = read_of(places[0], 1, 4)
        with pytest.raises(DamagedData) as caught:
            opened.read_many([read], memoryview(bytearray(read.length_bytes)))
        assert caught.value.details.key == KEYS[2]
    assert engine.match(BUCKET.name, KEYS) == 2
    assert engine.damaged_count == 1


def test_what_is_not_to_be_compared_comes_as_it_is(engine: LocalEngine) -> None:
    put_all(engine, StoredEncoding.PLANES_ZSTD, Verification.OFF)
    with engine.open_many(BUCKET.name, KEYS) as opened:
        places = frames_of(opened)
        damage(engine, places[2], 1, 100)
        read = read_of(places[2], 1)
        memory = memoryview(bytearray(read.length_bytes))
        opened.read_many([read], memory)
        with pytest.raises(DamagedData):
            SliceDecoder().decode_into(memory, np.empty(SLICE_BYTES, np.uint8))
    assert engine.match(BUCKET.name, KEYS) == COUNT
