"""Objects and chunks on their way into extents, where memory or the device's paths are scarce."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from objectcache_schemas.errors import Busy
from objectcache_schemas.limits import KIB, MIB
from objectcache_schemas.records import Condition
from objectcache_storage_server.engines.base import PrefixShape, StagedPut
from objectcache_storage_server.engines.disk.flush_latch import FlushLatch
from objectcache_storage_server.engines.local.engine import LocalEngine
from objectcache_storage_server.engines.local.puts.staged_runs import StagedRun
from objectcache_storage_server.engines.local.puts.write_paths import WritePaths
from objectcache_storage_server.engines.local.puts.writer_space import WriterSpace
from objectcache_storage_server.engines.local.space.holdings import Holdings
from objectcache_storage_server.engines.local.volumes.data_files import DataFiles
from objectcache_storage_server.engines.local.volumes.nvme_volume import NvmeVolume
from objectcache_storage_server.engines.local.volumes.volume import IoPath, Transfer, Volume
from objectcache_storage_server.engines.puts.put_buffers import Bytes, PutBuffers
from tests.contract.engine_suite import BUCKET, content, read
from tests.contract.opened_engines.local_engines import nvme_local_engine, small_local_engine
from tests.unit.examples import examples
from tests.unit.storage_server.engines.local.emulated_nvme import EmulatedNvme

LAYERS, SLICE_BYTES = 4, 4 * KIB
EXTENT_BYTES = 4 * LAYERS * SLICE_BYTES  # the small engines' rows hold four slices
SEGMENT_BYTES = 1 * MIB


# --- an object on its own, run by run ---


def emulated_volume(folder: Path) -> Volume:
    return NvmeVolume(EmulatedNvme(3 * MIB), folder, SEGMENT_BYTES)


def volume_of_files(folder: Path) -> Volume:
    return DataFiles(folder / "data", SEGMENT_BYTES, 2 * SEGMENT_BYTES, 0, "threads")


@st.composite
def cuts(draw: st.DrawFn, block_bytes: int) -> list[int]:
    """Lengths of the pieces in which an object comes: whole blocks, all but the last."""
    blocks = draw(st.lists(st.integers(1, max(1, 40_000 // block_bytes)), max_size=12))
    return [each * block_bytes for each in blocks] + [draw(st.integers(0, 2 * block_bytes))]


@pytest.mark.parametrize("open_volume", [emulated_volume, volume_of_files])
@settings(deadline=None, max_examples=examples(15))
@given(st.data(), st.integers(1, 20_000), st.sampled_from([4, 8, 24]))
def test_an_object_reads_back_out_of_its_runs_whatever_its_blocks_and_pieces(
    open_volume: Callable[[Path], Volume],
    data: st.DataObject,
    block_bytes: int,
    run_kib_max: int,
) -> None:
    lengths = data.draw(cuts(block_bytes))
    whole = content(tuple(lengths), sum(lengths))
    with tempfile.TemporaryDirectory() as folder:
        volume = open_volume(Path(folder))
        holdings = Holdings(volume, FlushLatch())
        holdings.load()
        writers = ThreadPoolExecutor(1)
        write_paths = WritePaths(volume, may_leave_out=False)
        buffers = PutBuffers(1 * MIB)
        space = WriterSpace(holdings, lambda _: 0, buffers, writers, write_paths, lambda: None)
        staged = StagedRun(space, "bucket", "key", block_bytes, run_kib_max * KIB)
        pieces: list[tuple[int, bytes]] = []
        begin = 0
        for length in lengths:
            pieces.append((begin, whole[begin : begin + length]))
            begin += length
        if data.draw(st.booleans()):
            pieces.reverse()
        for offset_bytes, piece in pieces:
            staged.write_at(offset_bytes, memoryview(piece))
        staged.finish()
        assert staged.size_bytes() == len(whole)
        assert bytes_of(staged, holdings, volume) == whole
        writers.shutdown()
        staged.discard()
        assert holdings.allocated_bytes == 0
        volume.close()


def bytes_of(staged: StagedRun, holdings: Holdings, volume: Volume) -> bytes:
    """What the extents hold: each whole blocks of the object, and the last one its end."""
    found = bytearray()
    ranges = holdings.ranges(staged.place()[0])
    for index, (offset_bytes, length_bytes) in enumerate(ranges):
        is_last = index == len(ranges) - 1
        usable_bytes = length_bytes - length_bytes % staged.block_bytes
        memory = bytearray(staged.size_bytes() - len(found) if is_last else usable_bytes)
        volume.read([Transfer(offset_bytes, memoryview(memory))], min(volume.paths))
        found += memory
    return bytes(found)


# --- memory in which chunks are gathered: storage.put_buffer_bytes_max ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def opened() -> Iterator[list[LocalEngine]]:
    engines: list[LocalEngine] = []
    yield engines
    for engine in engines:
        engine.close()


def half_put(
    engine: LocalEngine, name: str, slice_bytes: int = SLICE_BYTES
) -> tuple[list[StagedPut], Callable[[], None]]:
    """Four chunks of one extent, of which one is written; and what writes the others."""
    keys, chunk_bytes = [f"{name}-{index}" for index in range(4)], LAYERS * slice_bytes
    payload = b"".join(content(key, chunk_bytes) for key in keys)
    prefix = engine.stage_prefix(
        BUCKET.name, PrefixShape(keys, LAYERS, slice_bytes, layerwise=False)
    )
    puts = [StagedPut(staged, "") for staged in prefix.staged]
    try:
        prefix.write(0, memoryview(payload)[:chunk_bytes])
    except BaseException:
        prefix.discard()
        raise
    return puts, lambda: prefix.write(chunk_bytes, memoryview(payload)[chunk_bytes:])


def assert_stored(engine: LocalEngine, name: str, slice_bytes: int = SLICE_BYTES) -> None:
    for index in range(4):
        key = f"{name}-{index}"
        assert read(engine, key) == content(key, LAYERS * slice_bytes), key


@pytest.mark.parametrize(
    ("slice_bytes", "extent_bytes"), [(SLICE_BYTES, EXTENT_BYTES), (1000, LAYERS * 4096)]
)
def test_a_put_without_a_buffer_goes_through_the_page_cache_and_is_read_past_it(
    folder: Path, opened: list[LocalEngine], slice_bytes: int, extent_bytes: int
) -> None:
    engine = small_local_engine(folder, page_cache_bytes=0, put_buffer_bytes_max=extent_bytes)
    opened.append(engine)
    engine.create_bucket(BUCKET)
    first, finish_first = half_put(engine, "buffered", slice_bytes)
    second, finish_second = half_put(engine, "unbuffered", slice_bytes)
    finish_second()
    finish_first()
    for puts in (second, first):
        engine.commit(puts, Condition(immutable=True))
    for name in ("buffered", "unbuffered"):
        assert_stored(engine, name, slice_bytes)
    if IoPath.DIRECT in engine.volume.paths:
        assert {path.name: path.extent_bytes for path in engine.status().paths} == {
            "page_cache": 0,
            "direct": 2 * extent_bytes,
        }


def test_a_put_without_a_buffer_is_refused_where_there_is_no_page_cache(
    folder: Path, opened: list[LocalEngine]
) -> None:
    engine = nvme_local_engine(folder, put_buffer_bytes_max=EXTENT_BYTES)
    opened.append(engine)
    engine.create_bucket(BUCKET)
    first, finish_first = half_put(engine, "first")
    with pytest.raises(Busy, match=r"storage\.put_buffer_bytes_max"):
        half_put(engine, "second")
    finish_first()
    engine.commit(first, Condition(immutable=True))
    assert engine.status().allocated_bytes == EXTENT_BYTES  # of the refused one nothing is left
    puts, finish = half_put(engine, "second")  # the first one's buffer is free again
    finish()
    engine.commit(puts, Condition(immutable=True))
    for name in ("first", "second"):
        assert_stored(engine, name)


def test_a_put_that_is_given_up_returns_its_buffer(folder: Path, opened: list[LocalEngine]) -> None:
    engine = nvme_local_engine(folder, put_buffer_bytes_max=EXTENT_BYTES)
    opened.append(engine)
    engine.create_bucket(BUCKET)
    for _ in range(3):
        puts, _ = half_put(engine, "given up")
        for put in puts:
            put.staged.discard()
    assert engine.status().allocated_bytes == 0


@pytest.mark.parametrize(
    ("slice_bytes", "page_cache_bytes", "gathered_extents"),
    [(32 * KIB, -1, 1), (28 * KIB, -1, 3), (33 * KIB, -1, 3), (32 * KIB, 0, 3)],
)
def test_only_extents_that_come_in_pieces_of_short_slices_or_go_past_the_cache_are_gathered(
    folder: Path,
    opened: list[LocalEngine],
    monkeypatch: pytest.MonkeyPatch,
    slice_bytes: int,
    page_cache_bytes: int,
    gathered_extents: int,
) -> None:
    taken: list[int] = []
    take = PutBuffers.take

    def counted_take(buffers: PutBuffers, length_bytes: int) -> Bytes | None:
        taken.append(length_bytes)
        return take(buffers, length_bytes)

    monkeypatch.setattr(PutBuffers, "take", counted_take)
    engine = small_local_engine(
        folder,
        page_cache_bytes=page_cache_bytes,
        extent_row_bytes=4 * slice_bytes,
        extent_bytes_max=1 * MIB,
        put_buffer_bytes_max=8 * MIB,
    )
    if page_cache_bytes == 0 and IoPath.DIRECT not in engine.volume.paths:
        pytest.skip("this file system has no direct path")
    opened.append(engine)
    engine.create_bucket(BUCKET)
    keys, chunk_bytes = [f"chunk-{index}" for index in range(10)], LAYERS * slice_bytes
    payload = memoryview(b"".join(content(key, chunk_bytes) for key in keys))
    prefix = engine.stage_prefix(
        BUCKET.name, PrefixShape(keys, LAYERS, slice_bytes, layerwise=False)
    )
    cut = 5 * chunk_bytes  # of extents of four, four and two chunks the second comes in two pieces
    prefix.write(0, payload[:cut])
    prefix.write(cut, payload[cut:])
    engine.commit([StagedPut(staged, "") for staged in prefix.staged], Condition(immutable=True))
    assert len(taken) == gathered_extents
    for key in keys:
        assert read(engine, key) == content(key, chunk_bytes), key


# --- the length of extents ---


def test_a_namespace_formatted_with_short_segments_rules_what_an_extent_may_be(
    folder: Path, opened: list[LocalEngine]
) -> None:
    device = EmulatedNvme(17 * MIB)
    engine = nvme_local_engine(folder, device, data_file_bytes=4 * MIB)
    engine.create_bucket(BUCKET)
    engine.close()
    device.is_closed = False
    engine = nvme_local_engine(folder, device, data_file_bytes=8 * MIB, extent_bytes_max=8 * MIB)
    opened.append(engine)
    data = content("object", 9 * MIB)
    staged = engine.stage(BUCKET.name, "object", 64 * KIB)
    for begin in range(0, len(data), 2 * MIB):
        staged.write_at(begin, memoryview(data)[begin : begin + 2 * MIB])
    engine.commit([StagedPut(staged, "etag")])
    assert read(engine, "object") == data
